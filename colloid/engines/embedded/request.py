"""One sample in the engine: what was asked for, what has come out, and why it ended."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from colloid.engines.contract_generate import SamplingParams
from colloid.engines.embedded.logit_changes import LogitChanges
from colloid.engines.embedded.pages import Page


@dataclass(frozen=True)
class FinishReason:
    """type: "stop" (with `matched`: a token id or a stop string), "length" or "abort" (with `message`)."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None

    def to_json(self) -> dict[str, Any]:
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": self.length}
        return {"type": "abort", "message": self.message}


@dataclass(eq=False)
class Prefix:
    """A prompt whose keys and values are in the cache, and the samples that read it.

    `pages`: its full pages, once they are shared; before that they are the only member's own. `length`: tokens.
    `next_logits`: what the first token of each sample is drawn from (opaque to the scheduler).
    """

    key: bytes
    length: int
    num_full_pages: int
    members: list["Sequence"] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    is_ready: bool = False
    next_logits: Any = None
    experts: list[np.ndarray] = field(default_factory=list)  # chosen for its tokens, chunk by chunk, where recorded


@dataclass(eq=False)
class PromptLogProbs:
    """Those that a sample wants of its prompt: an entry for each token from `start` on, the first one None."""

    start: int
    temperature: float
    values: list[float | None]
    alternatives: "Alternatives"


LogProb = tuple[float, int]
"""A log-probability, and the token's id."""


@dataclass(eq=False)
class Alternatives:
    """Log-probs of other tokens than the one that stands there: of the `num_top` most probable, and of `ids`.

    `top` and `chosen` have an entry a position, None where nothing is predicted.
    """

    num_top: int = 0
    ids: tuple[int, ...] = ()
    top: list[list[LogProb] | None] = field(default_factory=list)
    chosen: list[list[LogProb] | None] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        return bool(self.num_top or self.ids)


@dataclass(eq=False)
class Sequence:
    """The state of one sample. Its randomness is its own: a stream of uniforms that follows from its seed.

    `on_update(sequence)` is called by the engine after each step in which it got a token (streams) or ended (all).
    """

    rid: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    suppressed_ids: tuple[int, ...]
    generator: random.Random
    on_update: Callable[["Sequence"], None]
    stream: bool = False
    prompt_log_probs: PromptLogProbs | None = None
    return_routed_experts: bool = False
    changes: LogitChanges | None = None
    alternatives: Alternatives = field(default_factory=Alternatives)
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prefix: Prefix | None = None
    pages: list[Page] = field(default_factory=list)
    reserved_pages: int = 0
    num_computed: int = 0  # positions in the cache
    created: float = field(default_factory=time.monotonic)
    experts: list[np.ndarray] = field(default_factory=list)  # int16 [tokens, layers, chosen], in the order of positions

    def append(self, token: int, log_prob: float, weight_version: str) -> None:
        if not self.version_starts or self.version_starts[-1][0] != weight_version:
            self.version_starts.append((weight_version, len(self.output_ids)))
        self.output_ids.append(token)
        self.log_probs.append(log_prob)
        if self.changes is not None:
            self.changes.count(token)

    def routed_experts(self) -> np.ndarray | None:
        """int32 [prompt and output tokens - 1, layers, chosen]: the experts of every token that was read. 0 in
        layers without any; None where they are not known.
        """
        count = len(self.prompt_ids) + len(self.output_ids) - 1
        rows = np.concatenate(self.experts) if self.experts else ()
        return rows[:count].astype(np.int32) if len(rows) >= count else None

    def version_spans(self, length: int) -> list[dict[str, Any]]:
        """Spans [start, end) of the first `length` output tokens by the version of the weights that drew them."""
        starts = [(version, start) for version, start in self.version_starts if start < length]
        ends = [start for _, start in starts[1:]] + [length]
        pairs = zip(starts, ends[: len(starts)], strict=True)
        return [{"version": version, "start": start, "end": end} for (version, start), end in pairs]

    def draw_uniform(self) -> float:
        """The next uniform in [0, 1), exact in float32."""
        return self.generator.getrandbits(24) / (1 << 24)
