"""The experts that the engine chose (`Sample.rollout_routed_experts`), as a column over all tokens of a batch.

Row i of a sample's array are the experts that its token i went to. What an answer holds is of all tokens but the last,
which the engine never read; tokens that were appended behind the last request have none either. Nothing that is trained
needs them.

`T` tokens of a batch, `L` layers of the whole model, `C` experts chosen a token.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colloid.data.batch import RolloutBatch
from colloid.data.sample import Sample
from colloid.errors import DataError

UNKNOWN = -1


@dataclass(frozen=True)
class RoutingShape:
    """Of a model with experts."""

    num_layers: int
    """Dense ones included."""
    num_chosen: int
    """Experts a token."""
    num_experts: int


def decoded(text: str | None, num_tokens: int, shape: RoutingShape) -> np.ndarray:
    """int16 [num_tokens - 1, L, C] from what an engine answers for a sequence of `num_tokens`.

    Raises:
        ValueError: it is not that.
    """
    if not isinstance(text, str):
        raise ValueError("there are none; an engine answers with them if it was started to")
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"it is not base64 of int32 numbers: {error}") from error
    wanted = (num_tokens - 1, shape.num_layers, shape.num_chosen)
    if len(flat) != np.prod(wanted):
        raise ValueError(
            f"it has {len(flat)} numbers, and {num_tokens} tokens - 1 x {shape.num_layers} layers x {shape.num_chosen} "
            f"experts are {np.prod(wanted)}"
        )
    return flat.astype(np.int16).reshape(wanted)


def routed_experts(samples: Sequence[Sample], batch: RolloutBatch, shape: RoutingShape) -> np.ndarray:
    """int16 [T, L, C], -1 where they are not known.

    Args:
        batch: of these samples, in their order.

    Raises:
        DataError: a sample's array has another shape, is too short for a token that is trained, or names an expert
            that there is not.
    """
    column = np.full((len(batch.tokens), shape.num_layers, shape.num_chosen), UNKNOWN, dtype=np.int16)
    missing = []
    for row, sample in enumerate(samples):
        found = sample.rollout_routed_experts
        experts = column[:0] if found is None else np.asarray(found)
        if experts.shape[1:] != column.shape[1:]:
            raise DataError(
                f"sample {sample.index}: rollout_routed_experts has the shape {list(experts.shape)}; it must be "
                f"[tokens - 1, {shape.num_layers} layers, {shape.num_chosen} experts]"
            )
        if len(experts) < _needed(batch, row):
            missing.append(sample.index)
            continue
        experts = experts[: batch.lengths[row]]
        if len(experts) and not UNKNOWN <= experts.min() <= experts.max() < shape.num_experts:
            raise DataError(
                f"sample {sample.index}: rollout_routed_experts holds numbers from {experts.min()} to {experts.max()}, "
                f"and the model's {shape.num_experts} experts are 0 to {shape.num_experts - 1}"
            )
        column[batch.offsets[row] : batch.offsets[row] + len(experts)] = experts
    if missing:
        raise DataError(
            f"--use-rollout-routing-replay, and {len(missing)} of {len(samples)} samples do not say which experts the "
            f"engine chose: {missing[:5]}{' …' if len(missing) > 5 else ''}. Have the generate function ask for "
            "return_routed_experts and keep the answer's in sample.rollout_routed_experts (and "
            "--custom-convert-samples-to-train-data-path return them), or leave the option out"
        )
    return column


def _needed(batch: RolloutBatch, row: int) -> int:
    """Rows of a sample that its trained tokens depend on: all before the last of them."""
    first, end = batch.response_offsets[row], batch.response_offsets[row + 1]
    trained = np.flatnonzero(batch.loss_mask[first:end])
    prompt = batch.lengths[row] - (end - first)
    return int(prompt + trained[-1]) if len(trained) else 0
