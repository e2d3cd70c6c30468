"""What /metrics tells: the engine's load, and what became of requests, in Prometheus' text format with SGLang's names.

The compute thread counts; the event loop reads while it does: what it shows may be a step old.
"""

import bisect
import time
from typing import Any

from colloid.engines.embedded.request import FinishReason, Sequence

LOAD = (
    ("sglang:num_running_reqs", "gauge", "Samples in the batch", "num_running_reqs"),
    ("sglang:num_queue_reqs", "gauge", "Samples that wait for room", "num_queued_reqs"),
    ("sglang:num_used_tokens", "gauge", "Positions of the cache in use", "num_used_tokens"),
    ("sglang:token_usage", "gauge", "Share of the cache in use", "token_usage"),
    ("sglang:generation_tokens_total", "counter", "Tokens generated", "generation_tokens_total"),
    ("sglang:prompt_tokens_total", "counter", "Prompt tokens computed", "prompt_tokens_total"),
    ("sglang:realtime_tokens_total", "counter", "Tokens computed", "realtime_tokens_total"),
)
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Histogram:
    """Counts of observations up to each of `SECONDS`, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> list[str]:
        counts, below, lines = list(self._counts), 0, []
        for limit, count in zip((*SECONDS, "+Inf"), counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{{labels},le="{limit}"}} {below}')
        return [*lines, f"{name}_sum{{{labels}}} {self._sum}", f"{name}_count{{{labels}}} {below}"]


class RequestMetrics:
    """Of all samples since the engine started."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_aborted = 0
        self.cached_tokens = 0
        self._first_token, self._whole = Histogram(), Histogram()

    def got_token(self, sequence: Sequence) -> None:
        """Called before a token is added."""
        if not sequence.output_ids:
            self._first_token.observe(time.monotonic() - sequence.created)

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        self.num_requests += 1
        self.num_aborted += reason.type == "abort"
        self.cached_tokens += sequence.cached_tokens
        self._whole.observe(time.monotonic() - sequence.created)

    def text(self, load: dict[str, Any], model_name: str) -> str:
        """The body of /metrics; `load`: values by the names in `LOAD`."""
        escaped = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = f'model_name="{escaped}"'
        lines: list[str] = []
        counters = (
            ("sglang:num_requests_total", "counter", "Samples that ended", self.num_requests),
            ("sglang:num_aborted_requests_total", "counter", "Samples that were aborted", self.num_aborted),
            ("sglang:cached_tokens_total", "counter", "Prompt tokens that were in the cache", self.cached_tokens),
        )
        loads = ((name, kind, text, load[key]) for name, kind, text, key in LOAD)
        for name, kind, text, value in (*loads, *counters):
            lines += [f"# HELP {name} {text}.", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {value}"]
        for name, text, histogram in (
            ("sglang:time_to_first_token_seconds", "Until a sample's first token", self._first_token),
            ("sglang:e2e_request_latency_seconds", "Until a sample ended", self._whole),
        ):
            lines += [f"# HELP {name} {text}.", f"# TYPE {name} histogram", *histogram.lines(name, labels)]
        return "\n".join(lines) + "\n"
