"""The teacher of on-policy distillation behind an engine (`--opd-type sglang`): it judges what the policy has sampled.

    finished sample ──► POST /generate, 0 new tokens, log-probs of the prompt from its last token on
                            ├──► `teacher_log_probs`, one a response token, at the sampling temperature
                            └──► refused, or failed at the last attempt ──► the sample is FAILED, with the reason

Only token ids go there and come back, so the teacher must have the policy's tokenizer; `check` sees whether it does.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colloid.data.prompts import load_tokenizer
from colloid.data.sample import Sample, Status
from colloid.errors import ConfigError, DeadlineExceeded, EngineError
from colloid.rollout.client import EngineClient, RequestRefused

API_KEY_VARIABLE = "COLLOID_TEACHER_API_KEY"
"""Where the key of a teacher that is not the run's own is taken from."""

CHECK_DEADLINE = 120.0
"""Seconds for the questions at the start."""

PROBE = "Compare: 3.14 × 2 = 6.28;\n\tdef f(x): return {x: 'naïve'}  # 你好 🙂"
"""Text that different tokenizers split differently."""

MarkFailed = Callable[[Sample, str, BaseException], None]
"""`(sample, culprit, error)`"""


class Teacher:
    """Asynchronous; used from one event loop.

    Args:
        client: of servers with SGLang's API.
        temperature: that log-probs are wanted at.
    """

    def __init__(self, client: EngineClient, *, temperature: float):
        self._client, self._temperature = client, temperature

    @property
    def url(self) -> str:
        """Where it is asked."""
        return self._client.router_url

    async def check(self, tokenizer: Any) -> None:
        """Sees whether the teacher can judge this tokenizer's ids.

        Raises:
            ConfigError: it has another vocabulary, or cannot give log-probs at the temperature.
            EngineError: it does not answer.
        """
        try:
            await asyncio.wait_for(self._check(tokenizer), CHECK_DEADLINE)
        except RequestRefused as error:
            raise ConfigError(
                f"the teacher at {self.url} does not take the policy's token ids; it must have the same tokenizer: "
                f"{error}"
            ) from error
        except (EngineError, DeadlineExceeded, asyncio.TimeoutError) as error:
            reason = str(error) or f"nothing within {CHECK_DEADLINE:g} s"
            raise EngineError(f"the teacher at {self.url} does not answer: {reason}") from error

    async def judge(self, samples: Sequence[Sample], mark_failed: MarkFailed) -> dict[str, float]:
        """Sets `teacher_log_probs` of the samples that have none yet; FAILED ones stay without. Returns metrics."""
        started = time.monotonic()
        open_samples = [
            sample for sample in samples if sample.status is not Status.FAILED and sample.teacher_log_probs is None
        ]
        await asyncio.gather(*(self._judge(sample, mark_failed) for sample in open_samples))
        return {"perf/teacher_time": time.monotonic() - started}

    async def log_probs(self, token_ids: list[int], response_length: int, name: str) -> list[float]:
        """The teacher's log-prob of each of the last `response_length` tokens.

        Raises:
            EngineError, DeadlineExceeded: see `EngineClient.generate`; or the answer does not hold what was asked for.
        """
        if not response_length:
            return []
        start = len(token_ids) - response_length - 1
        if start < 0:
            raise EngineError(f"{name} has no prompt: nothing predicts its first token")
        meta = await self._ask({"input_ids": token_ids, "logprob_start_len": start}, name)
        # As in SGLang the first entry is that of the token before the response, without a log-prob.
        entries = (meta.get("input_token_logprobs") or [])[1:]
        if [entry[1] for entry in entries] != list(token_ids[start + 1 :]):
            raise EngineError(
                f"the teacher's answer for {name} has {len(entries)} input_token_logprobs, which are not those of the "
                f"{response_length} response tokens"
            )
        values = [entry[0] for entry in entries]
        if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
            raise EngineError(f"the teacher's log-probs of {name} are not finite")
        return [float(value) for value in values]

    async def close(self) -> None:
        await self._client.close()

    async def _judge(self, sample: Sample, mark_failed: MarkFailed) -> None:
        name = f"sample {sample.index}"
        try:
            sample.teacher_log_probs = await self.log_probs(sample.tokens, sample.response_length, name)
        except (EngineError, DeadlineExceeded) as error:
            mark_failed(sample, f"teacher {self.url}", error)

    async def _ask(self, source: dict[str, Any], name: str) -> dict[str, Any]:
        payload = {**source, "sampling_params": {"temperature": 0, "max_new_tokens": 0}, "return_logprob": True}
        if self._temperature != 1:
            payload["input_logprob_temperature"] = self._temperature
        return (await self._client.generate(payload, name=name)).get("meta_info") or {}

    async def _check(self, tokenizer: Any) -> None:
        last = max(tokenizer.get_vocab().values())
        meta = await self._ask({"input_ids": [0, last], "logprob_start_len": 0}, "the check of the vocabulary")
        if len(meta.get("input_token_logprobs") or []) != 2:
            raise ConfigError(
                f"the teacher at {self.url} gives no input_token_logprobs; it must be a server with SGLang's API"
            )
        if self._temperature != 1 and meta.get("input_logprob_temperature") != self._temperature:
            raise ConfigError(
                f"the teacher at {self.url} gives log-probs at temperature 1, as SGLang does, and "
                f"--rollout-temperature is {self._temperature:g}: take 1, or give its directory (--opd-teacher-load)"
            )
        try:
            meta = await self._ask({"text": PROBE, "logprob_start_len": 0}, "the check of the tokenizer")
        except RequestRefused:  # It serves token ids alone.
            return
        theirs = [entry[1] for entry in meta.get("input_token_logprobs") or []]
        ours = tokenizer(PROBE)["input_ids"]
        if theirs != ours:
            raise ConfigError(
                f"the teacher at {self.url} has another tokenizer than --hf-checkpoint: it splits {PROBE!r} into "
                f"{len(theirs)} tokens ({theirs[:6]} …), the policy's into {len(ours)} ({ours[:6]} …)"
            )


def make_teacher(args: Any, own: EngineClient | None, connections: int) -> Teacher:
    """The teacher that the options ask for: a model of the run's own, or the server of `--rm-url`."""
    if own is not None:
        return Teacher(own, temperature=args.rollout_temperature)
    options = {"max_connections": connections, "proxy": args.http_proxy}
    client = server_client(args.rm_url, api_key=os.environ.get(API_KEY_VARIABLE), **options)
    return Teacher(client, temperature=args.rollout_temperature)


def server_client(url: str, **options: Any) -> EngineClient:
    """Of a teacher's server; `/generate` at the end of its address is left out or not."""
    # Nothing is aborted by its id: a judgement that is computed twice does no harm, and the connection is closed.
    return EngineClient(url.rstrip("/").removesuffix("/generate"), [], **options)


def check_same_tokenizer(directory: str, tokenizer: Any) -> None:
    """
    Raises:
        ConfigError: the teacher's directory has a tokenizer with another vocabulary.
    """
    if not any(Path(directory, name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return
    theirs, ours = load_tokenizer(directory).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        different = sum(theirs.get(token) != number for token, number in ours.items())
        raise ConfigError(
            f"--opd-teacher-load {directory} has another tokenizer than --hf-checkpoint: {len(theirs)} tokens, and "
            f"{len(ours)}; {different} of the latter are others or have another id there. A teacher judges the "
            "policy's token ids, so it must have the same ones"
        )
