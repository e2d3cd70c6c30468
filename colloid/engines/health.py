"""Does an engine live, make progress, and answer as one does? Asked directly, not through the router.

A process that ended is seen by its handle; this is for the others: hung, stuck, answering garbage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from colloid.engines.control import EngineAddress, EngineControl
from colloid.errors import EngineError

RUNNING_METRICS = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
TOKENS_METRIC = "sglang:realtime_tokens_total"
"""Tokens that an engine has computed so far, those of requests that still run included."""
PROBE = {
    "input_ids": [0],
    "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
    "return_logprob": True,
}


class Verdict(Enum):
    """What a check found."""

    HEALTHY = "healthy"
    BROKEN = "broken"
    """It answers, and not as an engine does: once may be chance."""
    LOST = "lost"
    """It does not answer."""


@dataclass(frozen=True)
class Health:
    """The result of a check.

    Attributes:
        reason: for a person, where it is not healthy.
        running: requests that run or wait; None: not asked.
        tokens: computed so far; None: not asked.
    """

    verdict: Verdict
    reason: str = ""
    running: int | None = None
    tokens: float | None = None


def check_engine(engine: EngineAddress, api_key: str | None, timeout: float, *, generates: bool = False) -> Health:
    """Asks an engine for its health. Never raises; takes a few times `timeout` at most.

    The embedded engine answers /health beside its computation, and tells how many tokens that has made. SGLang's
    counters lag behind, and its /health_generate looks at its scheduler.

    Args:
        timeout: seconds for each of the calls.
        generates: also asks for a token, and looks at the form of the answer.
    """
    control = EngineControl(engine.url, api_key, timeout)
    path = "/health_generate" if engine.kind == "sglang" else "/health"
    try:
        control.get(path)
        running, tokens = counters(control) if engine.kind != "sglang" else (None, None)
    except EngineError as error:
        return _verdict(error)
    except ValueError as error:
        return Health(Verdict.BROKEN, f"its /metrics cannot be read: {error}")
    if not generates:
        return Health(Verdict.HEALTHY, "", running, tokens)
    try:
        fault = fault_of(control.post("/generate", PROBE))
    except EngineError as error:
        if isinstance(error.__cause__, TimeoutError):  # its health is answered: it has much to do
            return Health(Verdict.HEALTHY, "", running, tokens)
        return _verdict(error)
    verdict = Verdict.BROKEN if fault else Verdict.HEALTHY
    return Health(verdict, f"its answer to a request has {fault}" if fault else "", running, tokens)


def counters(control: EngineControl) -> tuple[int, float]:
    """Requests that run or wait, and tokens computed so far.

    Raises:
        EngineError: it does not answer.
        ValueError: not with numbers.
    """
    text = control.text("/metrics")
    lines = [line for line in text.splitlines() if line.startswith((*RUNNING_METRICS, TOKENS_METRIC))]
    values = [(line, float(line.rsplit(" ", 1)[1])) for line in lines]
    running = sum(value for line, value in values if line.startswith(RUNNING_METRICS))
    return int(running), sum(value for line, value in values if line.startswith(TOKENS_METRIC))


def fault_of(answer: Any) -> str | None:
    """What is wrong with the form of an answer of /generate, if anything is."""
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        return "no meta_info"
    ids, entries = answer.get("output_ids"), answer["meta_info"].get("output_token_logprobs")
    if ids is not None and not (isinstance(ids, list) and all(isinstance(token, int) for token in ids[:1])):
        return "output_ids that are no token ids"
    if entries is not None and not (
        isinstance(entries, list) and all(isinstance(entry, list) and len(entry) >= 2 for entry in entries[:1])
    ):
        return "output_token_logprobs that are no [log-prob, token id, …]"
    return None


def _verdict(error: EngineError) -> Health:
    """A status or bytes that are no HTTP may be chance; no connection, or no answer in time, is none."""
    lost = isinstance(error.__cause__, OSError)
    return Health(Verdict.LOST if lost else Verdict.BROKEN, str(error))
