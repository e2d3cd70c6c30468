"""Draws one token a row, and gives its log-probability. Rows do not influence each other.

A token comes from a two-level inverse CDF: one uniform number a row picks a block of the vocabulary, then a token in
it; one pass over the probabilities, and a generator per request costs nothing. The log-probability is always that of
the whole softmax at the row's temperature, before top-k, top-p, min-p, penalties, biases, and before end-of-sequence
tokens are held back by min_new_tokens: it is the policy's, which a trainer recomputes from the logits alone.

Shapes: `B` rows, `V` vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from colloid.engines.embedded.logit_changes import LogitChanges

BLOCK = 256
# A filtered row is first looked for among its most probable tokens; the whole row is sorted if they don't suffice.
CANDIDATES = 1024


@dataclass(frozen=True)
class RowParams:
    """How one row is drawn. `uniform` in [0, 1); `suppressed`: token ids that may not come yet."""

    temperature: float
    uniform: float
    greedy: bool = False
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    suppressed: tuple[int, ...] = ()
    changes: LogitChanges | None = None

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def differs(self) -> bool:
        """Whether it is drawn from other logits than the model's."""
        return bool(self.suppressed) or self.changes is not None

    @property
    def divisor(self) -> float:
        """Of the logits; a greedy row's log-probabilities are those at temperature 1."""
        return 1.0 if self.greedy else self.temperature


def sample(logits: torch.Tensor, rows: Sequence[RowParams]) -> tuple[list[int], list[float]]:
    """logits [B, V] float32 (overwritten). Returns token ids and their log-probabilities, one a row.

    A row whose logits are not finite gets a log-probability that is not finite either.
    """
    temperatures = torch.tensor([row.divisor for row in rows])
    if any(row.divisor != 1.0 for row in rows):
        logits = logits.div_(temperatures[:, None])
    probabilities = torch.softmax(logits, -1)
    weights = _restricted(logits, probabilities, rows)
    tokens = draw(weights, torch.tensor([row.uniform for row in rows]))
    for i, row in enumerate(rows):
        if row.greedy:
            tokens[i] = weights[i].argmax()
    log_probs = _log_probs(logits, probabilities, tokens, rows)
    return tokens.tolist(), log_probs


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Indices [B] drawn in proportion to weights [B, V] (not negative, sum > 0); never one of weight 0."""
    rows, vocab = weights.shape
    if vocab % BLOCK:
        weights = F.pad(weights, (0, BLOCK - vocab % BLOCK))
    blocks = weights.view(rows, -1, BLOCK)
    sums = blocks.sum(-1)
    cumulative = sums.cumsum(-1)
    rest = uniforms[:, None] * cumulative[:, -1:]
    block = (cumulative <= rest).sum(-1, keepdim=True).clamp_(max=blocks.shape[1] - 1)
    rest = (rest - (cumulative.gather(1, block) - sums.gather(1, block))).clamp_(min=0)
    inner = blocks[torch.arange(rows), block[:, 0]].cumsum(-1)
    # Rounding may leave `rest` at the block's sum: then its last token that has weight is meant.
    index = torch.minimum((inner <= rest).sum(-1), (inner < inner[:, -1:]).sum(-1))
    return (block[:, 0] * BLOCK + index).clamp_(max=vocab - 1)


def _restricted(logits: torch.Tensor, probabilities: torch.Tensor, rows: Sequence[RowParams]) -> torch.Tensor:
    """The weights to draw with: the probabilities, changed in the rows that suppress or filter."""
    special = [i for i, row in enumerate(rows) if row.differs or (row.filters and not row.greedy)]
    if not special:
        return probabilities
    weights = probabilities.clone()
    for i in special:
        row = rows[i]
        if row.differs:
            changed = logits[i] if row.changes is None else row.changes.apply(logits[i], row.divisor)
            if row.suppressed:
                changed = changed.index_fill(0, torch.tensor(row.suppressed), float("-inf"))
            weights[i] = torch.softmax(changed, -1)
        if row.filters and not row.greedy:
            weights[i] = filtered(weights[i], row.top_k, row.top_p, row.min_p)
    return weights


def filtered(weights: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Zeroes the entries of weights [V] (sum 1) that the filters cut off.

    Kept are the top_k largest (-1: all), of these the shortest run of the largest that reaches top_p, of these the
    ones of at least min_p times the largest; all three measured on the unfiltered probabilities, as in SGLang.
    """
    vocab = len(weights)
    values, ids = weights.topk(min(CANDIDATES, vocab))
    if len(values) < vocab and _needs_more(values, top_k, top_p, min_p):
        values, ids = weights.sort(descending=True, stable=True)
    before = values.cumsum(0) - values
    keep = (before < top_p) & (values >= min_p * values[0])
    if top_k > 0:
        keep[top_k:] = False
    keep[0] = True
    return torch.zeros_like(weights).index_copy_(0, ids, values * keep)


def _needs_more(values: torch.Tensor, top_k: int, top_p: float, min_p: float) -> bool:
    enough = 0 < top_k <= len(values) or float(values.sum()) >= top_p or float(values[-1]) < min_p * float(values[0])
    return not enough


def _log_probs(
    logits: torch.Tensor, probabilities: torch.Tensor, tokens: torch.Tensor, rows: Sequence[RowParams]
) -> list[float]:
    # math.log, because a vectorized logarithm rounds by an element's place in its vector.
    log_probs = [
        math.log(p) if p > 0 else -math.inf if p == 0 else p
        for p in probabilities.gather(1, tokens[:, None])[:, 0].tolist()
    ]
    for i, row in enumerate(rows):
        if row.differs:
            # What was held back may have had all the probability: what is left could underflow to 0.
            log_probs[i] = float(torch.log_softmax(logits[i], -1)[tokens[i]])
    return log_probs


def alternatives(logits_V: torch.Tensor, num_top: int, ids: tuple[int, ...]) -> tuple[list, list]:
    """(log-probability, token id) of the most probable tokens, and of some given ones, from logits [V]."""
    log_probs = torch.log_softmax(logits_V, -1)
    top: list[tuple[float, int]] = []
    if num_top:
        values, tokens = log_probs.topk(min(num_top, len(log_probs)))
        top = list(zip(values.tolist(), tokens.tolist(), strict=True))
    return top, list(zip(log_probs[list(ids)].tolist(), ids, strict=True)) if ids else []
