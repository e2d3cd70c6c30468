"""The log-prob head: log-probs (and entropies) of target tokens from hidden states, without the logits in memory.

Logits exist only block by block (some tokens by some rows of the vocabulary), in float32, and are computed again in
the backward pass: four matrix products in all instead of three, and no [T, V] tensor. A block is small enough to stay
in a CPU's cache, and large enough to keep a GPU busy.

The vocabulary may be split over a tensor-parallel group: each rank holds its rows of the weight; all get the full
log-probs, the full gradient of the hidden states, and the gradient of their own rows.

T tokens, H hidden, V rows of the vocabulary that are held here; c tokens and v rows of a block. x are the logits
divided by the temperature, p their softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp, all_reduce, get_rank

CPU_BLOCK_ELEMENTS = 1 << 19
CPU_CHUNK_TOKENS = 1024
DEVICE_BLOCK_ELEMENTS = 1 << 26
DEVICE_CHUNK_TOKENS = 4096


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int = -1,
    with_entropy: bool = False,
    tp_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` under softmax(hidden @ weight.T / temperature), and the entropies of that softmax.

    Both carry gradients to `hidden` and `weight`. The softmax is computed in float32 (in float64 for float64 inputs).

    Args:
        hidden: [T, H]; the same on all ranks of `tp_group`. T may be 0.
        weight: [V, H]: all rows, or those of this rank.
        targets: int64 [T], ids in the whole vocabulary.
        chunk_tokens: most tokens in a block; -1 chooses.
        with_entropy: also compute entropies.
        tp_group: the ranks that share the vocabulary; rank r holds the rows from r * V on.
        vocab_size: rows of the whole vocabulary from here on are padding, and take no part; None: there are none.

    Returns:
        Log-probs float32 [T], and entropies float32 [T] or None.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"the temperature of log-probs is {temperature}; it must be above 0")
    first_row = 0 if tp_group is None else get_rank(tp_group) * len(weight)
    num_rows = len(weight) if vocab_size is None else min(max(vocab_size - first_row, 0), len(weight))
    head = _Head(1.0 / temperature, chunk_tokens, with_entropy, tp_group, first_row, num_rows)
    return _TokenLogProbs.apply(hidden, weight, targets, head)


@dataclass(frozen=True)
class _Head:
    """What all blocks of one call have in common."""

    inverse_temperature: float
    chunk_tokens: int
    with_entropy: bool
    tp_group: ProcessGroup | None
    first_row: int
    """Id of the first row that is held here."""
    num_rows: int
    """Rows that are held here, without padding."""

    def token_chunks(self, hidden: Tensor) -> Iterator[slice]:
        return _slices(len(hidden), self._chunk_size(hidden))

    def row_blocks(self, hidden: Tensor) -> Iterator[slice]:
        return _slices(self.num_rows, self._block_size(hidden))

    def scratch(self, hidden: Tensor, count: int) -> list[Tensor]:
        """`count` buffers for a block each: made once, as fresh ones for every block would fragment the heap."""
        size = min(self._chunk_size(hidden), len(hidden)) * min(self._block_size(hidden), self.num_rows)
        return [torch.empty(size, dtype=_softmax_dtype(hidden), device=hidden.device) for _ in range(count)]

    def _block_size(self, hidden: Tensor) -> int:
        elements = CPU_BLOCK_ELEMENTS if hidden.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
        return max(1, elements // max(1, min(self._chunk_size(hidden), len(hidden))))

    def _chunk_size(self, hidden: Tensor) -> int:
        if self.chunk_tokens > 0:
            return self.chunk_tokens
        return CPU_CHUNK_TOKENS if hidden.device.type == "cpu" else DEVICE_CHUNK_TOKENS

    def logits(self, hidden_cH: Tensor, weight_vH: Tensor, scratch: Tensor) -> Tensor:
        """x [c, v], in `scratch`. Half precision stays so where the hardware sums its products in float32."""
        x_cv = _block(scratch, len(hidden_cH), len(weight_vH))
        if hidden_cH.is_cuda and hidden_cH.dtype != x_cv.dtype:
            torch.mm(hidden_cH, weight_vH.t(), out_dtype=x_cv.dtype, out=x_cv)
            return x_cv.mul_(self.inverse_temperature)
        hidden_cH, weight_vH = hidden_cH.to(x_cv.dtype), weight_vH.to(x_cv.dtype)
        return torch.addmm(x_cv, hidden_cH, weight_vH.t(), beta=0, alpha=self.inverse_temperature, out=x_cv)

    def targets_in(self, rows: slice, targets: Tensor) -> tuple[Tensor, Tensor]:
        """[c, 1] each: the column of every target in the block, and whether it is in there at all."""
        columns = targets.unsqueeze(1) - (self.first_row + rows.start)
        width = rows.stop - rows.start
        return columns.clamp(0, width - 1), (columns >= 0) & (columns < width)


@dataclass(frozen=True)
class _Partial:
    """What a part of the vocabulary adds to the softmax of each token; tensors of one shape."""

    largest: Tensor
    """max x."""
    total: Tensor
    """sum of exp(x - largest)."""
    moment: Tensor
    """sum of exp(x - largest) (x - largest); 0 where entropies are not asked for."""
    target: Tensor
    """x of the target, 0 where it is in another part."""

    def relative_to(self, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Total, moment and target, the first two relative to another maximum: such ones can be added over parts."""
        shift = self.largest - largest
        scale = shift.exp()
        return self.total * scale, (self.moment + self.total * shift) * scale, self.target


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head):
        dtype = _softmax_dtype(hidden)
        largest, total, moment, target = (torch.zeros(len(hidden), dtype=dtype, device=hidden.device) for _ in range(4))
        scratch = head.scratch(hidden, 2 if head.with_entropy else 1)
        for tokens in head.token_chunks(hidden):
            parts = []
            for rows in head.row_blocks(hidden):
                x_cv = head.logits(hidden[tokens], weight[rows], scratch[0])
                parts.append(_block_partial(x_cv, *head.targets_in(rows, targets[tokens]), scratch[1:]))
            largest[tokens], total[tokens], moment[tokens], target[tokens] = _combine(parts, largest[tokens])
        if head.tp_group is not None:
            local = _Partial(largest.clone(), total, moment, target)
            all_reduce(largest, ReduceOp.MAX, group=head.tp_group)
            sums = torch.stack(local.relative_to(largest))
            all_reduce(sums, ReduceOp.SUM, group=head.tp_group)
            total, moment, target = sums
        log_total = total.log()
        entropy = log_total - moment / total
        ctx.save_for_backward(hidden, weight, targets, largest + log_total, entropy)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return target - largest - log_total, entropy if head.with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, targets, log_normaliser, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_normaliser)
        dtype = log_normaliser.dtype
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        # The gradient of x is `factor` times a block, token by token. Without entropies the block is p - onehot alone,
        # and the factor goes into the small matrices.
        factor = -head.inverse_temperature * (
            grad_log_probs if grad_entropy is None else torch.ones_like(grad_log_probs)
        )
        scratch = head.scratch(hidden, 1 if grad_entropy is None else 2)
        for rows in head.row_blocks(hidden):
            weight_vH = weight[rows]
            rows_grad = torch.zeros(weight_vH.shape, dtype=dtype, device=weight.device) if needs_weight else None
            for tokens in head.token_chunks(hidden):
                block = head.logits(hidden[tokens], weight_vH, scratch[0]).sub_(log_normaliser[tokens, None])
                columns, inside = head.targets_in(rows, targets[tokens])
                if grad_entropy is None:
                    block, at_target = block.exp_(), inside.to(dtype)
                else:
                    slope = grad_entropy[tokens, None]
                    at_target = inside * grad_log_probs[tokens, None]
                    probs = torch.exp(block, out=_block(scratch[1], *block.shape))
                    block = block.add_(entropy[tokens, None]).mul_(slope).add_(grad_log_probs[tokens, None]).mul_(probs)
                block.scatter_(1, columns, block.gather(1, columns) - at_target)
                if needs_hidden:
                    _add_matmul(grad_hidden[tokens], block, weight_vH)
                if needs_weight:
                    _add_matmul(rows_grad, block.t(), hidden[tokens] * factor[tokens, None])
            if needs_weight:
                grad_weight[rows] = rows_grad
        if needs_hidden:
            grad_hidden = grad_hidden.mul_(factor[:, None])
            if head.tp_group is not None:
                all_reduce(grad_hidden, ReduceOp.SUM, group=head.tp_group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None


def _block_partial(x_cv: Tensor, columns: Tensor, inside: Tensor, scratch: list[Tensor]) -> _Partial:
    """Uses up `x_cv`. The moment takes a buffer of `scratch`; without one it is left out."""
    target = torch.where(inside, x_cv.gather(1, columns), 0.0).squeeze(1)
    largest = x_cv.amax(1)
    x_cv.sub_(largest[:, None])
    if not scratch:
        total = x_cv.exp_().sum(1)
        return _Partial(largest, total, torch.zeros_like(total), target)
    exponentials = torch.exp(x_cv, out=_block(scratch[0], *x_cv.shape))
    return _Partial(largest, exponentials.sum(1), exponentials.mul_(x_cv).sum(1), target)


def _combine(parts: list[_Partial], like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest, total, moment and target over all blocks held here, [c] each."""
    if not parts:
        # All rows are padding: the smallest finite maximum, so that the other ranks' parts win without a NaN.
        nothing = torch.zeros_like(like)
        return torch.full_like(like, torch.finfo(like.dtype).min), nothing, nothing, nothing
    names = ("largest", "total", "moment", "target")
    stacked = _Partial(*(torch.stack([getattr(part, name) for part in parts]) for name in names))
    largest = stacked.largest.amax(0)
    return largest, *(values.sum(0) for values in stacked.relative_to(largest))


def _softmax_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _block(scratch: Tensor, rows: int, columns: int) -> Tensor:
    return scratch[: rows * columns].view(rows, columns)


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total` += left @ right, in place."""
    if right.is_cuda and right.dtype != total.dtype:
        total.add_(torch.mm(left.to(right.dtype), right, out_dtype=total.dtype))
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
