"""One sample: prompt ids in, sampled ids with log-probs and weight versions out. The built-in single turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from colloid.data.prompts import tokenize_prompt
from colloid.data.routing import RoutingShape, decoded
from colloid.data.sample import Sample, Status
from colloid.errors import EngineError
from colloid.rollout.client import INTERRUPTED, EngineClient
from colloid.rollout.options import SamplingOptions, request_seed

FINISH_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


async def generate_sample(
    sample: Sample, client: EngineClient, tokenizer, sampling: SamplingOptions, params: dict[str, Any]
) -> Sample:
    """Generates the response of `sample`, in place; in several parts, where `EngineClient.interrupted` cuts it.

    Args:
        params: SGLang's sampling parameters of this request.
    """
    ensure_prompt_tokens(sample, tokenizer, sampling)
    left = params["max_new_tokens"]
    while left > 0:
        own = {**params, "max_new_tokens": left}
        if sample.response_length and "sampling_seed" in params:  # not the draws of the first part again
            own["sampling_seed"] = request_seed(params["sampling_seed"], 0, sample.response_length)
        payload = {"input_ids": sample.tokens, "sampling_params": own, "return_logprob": True}
        if sampling.routing is not None:
            payload["return_routed_experts"] = True
        before = sample.response_length
        answer = await client.generate(payload, name=f"sample {sample.index}", resumable=True)
        record_answer(sample, answer)
        if sampling.routing is not None:
            record_routing(sample, answer, sampling.routing)
        sample.response = response_text(sample, answer, tokenizer, sampling.skip_special_tokens)
        if not answer.get(INTERRUPTED):
            return sample
        left -= sample.response_length - before
    sample.status = Status.TRUNCATED
    return sample


def ensure_prompt_tokens(sample: Sample, tokenizer, sampling: SamplingOptions) -> None:
    """Tokenises the prompt of a sample that came without ids (a user's data source)."""
    if not sample.tokens:
        kwargs = {**sampling.apply_chat_template_kwargs, **(sample.apply_chat_template_kwargs or {})}
        tools = sample.metadata.get("tools")
        sample.tokens = tokenize_prompt(sample.prompt, tokenizer, tools=tools, **kwargs)


def record_answer(sample: Sample, answer: dict[str, Any]) -> None:
    """Appends the sampled ids, their log-probs and weight versions, exactly as the engine recorded them.

    Raises:
        EngineError: the answer does not hold what was asked for.
    """
    meta = answer.get("meta_info") or {}
    entries = meta.get("output_token_logprobs")
    if entries is None:
        raise EngineError(f"the engine's answer for sample {sample.index} has no output_token_logprobs: {_head(meta)}")
    ids = [entry[1] for entry in entries]
    output_ids = answer.get("output_ids")
    if output_ids is not None and list(output_ids) != ids:
        raise EngineError(
            f"the engine's answer for sample {sample.index} contradicts itself: {len(output_ids)} output_ids, and "
            f"log-probs of {len(ids)} tokens that are not the same"
        )
    finish = (meta.get("finish_reason") or {}).get("type")
    if finish not in FINISH_STATUS:
        raise EngineError(f"the engine's answer for sample {sample.index} has the finish reason {finish!r}")
    log_probs = [float(entry[0]) for entry in entries]
    sample.append_response_tokens(ids, log_probs=log_probs, weight_version=_token_versions(meta, len(ids)))
    sample.status = FINISH_STATUS[finish]


def record_routing(sample: Sample, answer: dict[str, Any], shape: RoutingShape) -> None:
    """Keeps the experts of all tokens so far, once the answer's own tokens are appended.

    Raises:
        EngineError: the answer does not hold them.
    """
    meta = answer.get("meta_info") or {}
    if meta.get("routed_experts") is None and sample.status is Status.ABORTED and not answer.get("output_ids"):
        return
    sample.rollout_routed_experts = routing_of(answer, len(sample.tokens), shape, sample.index)


def routing_of(answer: dict[str, Any], num_tokens: int, shape: RoutingShape, index: int | None) -> np.ndarray:
    """int16 [num_tokens - 1, L, C]: the experts of a request's tokens and of those of its answer, but the last.

    Args:
        index: of the sample, for errors.

    Raises:
        EngineError: the answer does not hold them.
    """
    try:
        return decoded((answer.get("meta_info") or {}).get("routed_experts"), num_tokens, shape)
    except ValueError as error:
        raise EngineError(f"the engine's answer for sample {index}: routed_experts: {error}") from error


def response_text(sample: Sample, answer: dict[str, Any], tokenizer, skip_special_tokens: bool) -> str:
    """The response's text, from its ids. The token that ended it is not part of it, where it is a special one."""
    ids = sample.tokens[len(sample.tokens) - sample.response_length :]
    matched = ((answer.get("meta_info") or {}).get("finish_reason") or {}).get("matched")
    ended = sample.status is Status.COMPLETED and matched in (None, ids[-1] if ids else None)
    if ids and ended and ids[-1] in tokenizer.all_special_ids:
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def _token_versions(meta: dict[str, Any], count: int) -> int | list[int]:
    """The weight version of each token: from the spans, where there is more than one."""
    spans = meta.get("weight_versions") or []
    if len(spans) <= 1:
        version = spans[0]["version"] if spans else meta.get("weight_version")
        return _number(version)
    versions = [-1] * count
    for span in spans:
        for position in range(span["start"], min(span["end"], count)):
            versions[position] = _number(span["version"])
    return versions


def _number(version: Any) -> int:
    """SGLang's first version is the word `default`: unknown."""
    return int(version) if str(version).lstrip("-").isdigit() else -1


def _head(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "…"
