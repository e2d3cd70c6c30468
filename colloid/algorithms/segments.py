"""Sums and means over the samples of packed arrays.

Packed: the response tokens of all samples lie one after the other in arrays of length R, and `sample_index` (int64
[R], not decreasing) says whose each token is. Masked positions are selected away by `where`, so that no value at
them, infinite or not, reaches a result or a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`values` where `mask`, else `fill`. Same shape."""
    return torch.where(mask, values, fill)


def segment_sum(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[S]: the sum of `values` [N] over each of the `segments` (int64 [N])."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def segment_mean(values: Tensor, mask: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[S]: the mean of `values` [N] over each segment's unmasked entries; 0 where there are none."""
    counts = segment_sum(mask.to(values.dtype), segments, num_segments)
    return segment_sum(masked(values, mask), segments, num_segments) / counts.clamp(min=1)


def discounted_sums(values: Tensor, segments: Tensor, discount: float) -> Tensor:
    """y_t = values_t + discount * y_{t+1} within each segment (of adjacent entries).

    By doubling the reach in each pass, so that it takes log2 of the longest segment's length many passes.

    Args:
        values: [N].
        segments: int64 [N], equal entries adjacent.

    Returns:
        [N], of the dtype of `values`.
    """
    sums, reach = values, 1
    while reach < len(values):
        same_segment = segments[reach:] == segments[:-reach]
        if not bool(same_segment.any()):
            break
        further = masked(sums[reach:], same_segment) * discount**reach
        sums = torch.cat([sums[:-reach] + further, sums[-reach:]])
        reach *= 2
    return sums


def last_of_segment(segments: Tensor) -> Tensor:
    """bool [N]: True at the last entry of each segment (of adjacent entries)."""
    last = torch.ones_like(segments, dtype=torch.bool)
    last[:-1] = segments[1:] != segments[:-1]
    return last
