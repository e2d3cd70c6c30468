"""The body of an answer to /generate: a sample's text, ids and `meta_info`, as SGLang writes them."""

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colloid.engines.embedded.request import Alternatives, FinishReason, LogProb, Sequence
from colloid.engines.embedded.text import Text


@dataclass(frozen=True)
class AnswerWriter:
    """Of one request.

    Args:
        weight_version: that an answer without tokens has.
        shows_text: whether log-probs come with their token's text.
        started: time.time() at which the request came.
    """

    text: Text
    weight_version: Callable[[], str]
    shows_text: bool
    started: float

    def answer(self, sequence: Sequence, length: int, reason: FinishReason | None, logprobs: bool) -> dict[str, Any]:
        """What is known after `length` output tokens. `reason`: None while more are to come."""
        spans = sequence.version_spans(length)
        meta: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": reason.to_json() if reason else None,
            "prompt_tokens": len(sequence.prompt_ids),
            "completion_tokens": length,
            "cached_tokens": sequence.cached_tokens,
            "weight_version": spans[-1]["version"] if spans else self.weight_version(),
            "weight_versions": spans,
            "e2e_latency": time.time() - self.started,
        }
        ids = sequence.output_ids[:length]
        if logprobs:
            meta |= self._log_probs(sequence, ids)
        if sequence.return_routed_experts and reason:
            experts = sequence.routed_experts()
            meta["routed_experts"] = None if experts is None else base64.b64encode(experts.tobytes()).decode()
        return {"text": self.text.decode(sequence, length, reason), "output_ids": ids, "meta_info": meta}

    def _log_probs(self, sequence: Sequence, ids: list[int]) -> dict[str, Any]:
        pairs = zip(sequence.log_probs[: len(ids)], ids, strict=True)
        meta: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": [self._entry(log_prob, token) for log_prob, token in pairs],
        }
        of_prompt = sequence.prompt_log_probs
        if of_prompt is not None:
            pairs = zip(of_prompt.values, sequence.prompt_ids[of_prompt.start :], strict=True)
            meta["input_token_logprobs"] = [self._entry(log_prob, token) for log_prob, token in pairs]
            meta["input_logprob_temperature"] = of_prompt.temperature
            meta |= self._others("input", of_prompt.alternatives, len(of_prompt.values))
        return meta | self._others("output", sequence.alternatives, len(ids))

    def _others(self, side: str, others: Alternatives, length: int) -> dict[str, Any]:
        meta = {}
        if others.num_top:
            meta[f"{side}_top_logprobs"] = self._rows(others.top[:length])
        if others.ids:
            meta[f"{side}_token_ids_logprobs"] = self._rows(others.chosen[:length])
        return meta

    def _rows(self, rows: list[list[LogProb] | None]) -> list[list[list] | None]:
        return [None if row is None else [self._entry(*pair) for pair in row] for row in rows]

    def _entry(self, log_prob: float | None, token: int) -> list:
        return [log_prob, token, self.text.token_text(token) if self.shows_text else None]
