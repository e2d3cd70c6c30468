"""`--custom-convert-samples-to-train-data-path`: a dict of lists, made by the user, in place of the samples.

The lists are of one length, one entry a row that is trained. A row belongs to a sample of the rollout (by
`sample_indices`, or by its place), from which it has what is not given: group, status, rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from colloid.data.batch import RolloutBatch
from colloid.data.columns import to_columns
from colloid.data.sample import Sample, Status
from colloid.errors import DataError, HookError

REQUIRED = {
    "tokens": "list of token ids: prompt, then response",
    "response_lengths": "int: how many of them are the response",
    "rewards": "float: shaped already, the advantage's source; used as it is",
}
OPTIONAL = {
    "raw_reward": "float: for metrics; rewards where it is not given",
    "loss_masks": "list of 0 and 1, one a response token; 1 where it is not given",
    "rollout_log_probs": "list of float, one a response token",
    "weight_versions": "list of int, one a response token",
    "teacher_log_probs": "list of float, one a response token (--opd-type sglang)",
    "rollout_routed_experts": "array [tokens - 1, layers, experts a token] (--use-rollout-routing-replay)",
    "sample_indices": "int: the sample that the row is made of; the sample at its place where it is not given",
    "group_indices": "int: the sample's where it is not given",
    "rollout_ids": "int: rows that share it weigh as one; the sample's where it is not given",
}

PER_TOKEN = {"loss_masks": "loss_mask"} | {
    name: name for name in ("rollout_log_probs", "weight_versions", "teacher_log_probs")
}
"""Keys whose entries are lists with one value a response token -> fields of a sample."""


def converted_batch(
    convert: Callable[[list[Sample]], Any],
    name: str,
    samples: list[Sample],
    *,
    num_steps: int,
    per_token_loss: bool,
) -> tuple[list[Sample], RolloutBatch]:
    """What the user's function makes of the samples: its rows, each as a sample, and their columns.

    Args:
        convert: `(samples) -> dict[str, list]`.
        name: of the function, for errors.

    Raises:
        HookError: it returned something else, with what and where.
    """
    data = _checked(convert(samples), name, len(samples))
    count = len(data["tokens"])
    by_index = {sample.index: sample for sample in reversed(samples)}
    rows = [_row(data, row, samples, by_index, name) for row in range(count)]
    try:
        _check_finite(rows, _numbers(data["rewards"]))
        return rows, to_columns(
            rows,
            raw_rewards=_numbers(data.get("raw_reward", data["rewards"])),
            rewards=_numbers(data["rewards"]),
            num_steps=num_steps,
            per_token_loss=per_token_loss,
        )
    except (DataError, TypeError, ValueError, OverflowError) as error:
        raise HookError(f"{name}: what it returned cannot be trained: {error}") from error


def _checked(data: Any, name: str, num_samples: int) -> dict[str, list]:
    if not isinstance(data, dict):
        raise HookError(f"{name} must return a dict of lists, and returned {type(data).__name__}")
    missing = [f"{key} ({text})" for key, text in REQUIRED.items() if key not in data]
    if missing:
        raise HookError(f"{name}: the dict lacks {', '.join(missing)}; it has {', '.join(sorted(data)) or 'nothing'}")
    unknown = sorted(set(data) - {*REQUIRED, *OPTIONAL, "truncated"})
    if unknown:
        known = ", ".join([*REQUIRED, *OPTIONAL])
        raise HookError(f"{name}: nothing reads {', '.join(map(str, unknown))}; the keys are {known}")
    data = {key: values for key, values in data.items() if values is not None}
    for key in data:
        if isinstance(data[key], str) or not hasattr(data[key], "__len__"):
            raise HookError(f"{name}: {key} must be a list, and is {type(data[key]).__name__}")
    count = len(data["tokens"])
    wrong = [f"{key} has {len(values)}" for key, values in data.items() if len(values) != count]
    if wrong:
        raise HookError(f"{name}: all lists need one entry a row; tokens has {count} entries, {', '.join(wrong)}")
    if not count:
        raise HookError(f"{name} returned no rows of {num_samples} samples")
    if "sample_indices" not in data and count != num_samples:
        raise HookError(
            f"{name} returned {count} rows of {num_samples} samples: sample_indices must say which sample each is of"
        )
    return data


def _check_finite(rows: list[Sample], rewards: np.ndarray) -> None:
    for row, (sample, reward) in enumerate(zip(rows, rewards, strict=True)):
        if sample.status is not Status.FAILED and not np.isfinite(reward):
            raise DataError(f"rewards[{row}] (sample {sample.index}) is {reward}; it must be finite")


def _row(
    data: dict[str, list], row: int, samples: list[Sample], by_index: dict[int | None, Sample], name: str
) -> Sample:
    """One row as a sample: what the dict says, and the rest from the sample that it is made of."""
    if "sample_indices" in data:
        index = int(data["sample_indices"][row])
        origin = by_index.get(index)
        if origin is None:
            raise HookError(f"{name}: sample_indices[{row}] is {index}, and the rollout has no such sample")
    else:
        origin = samples[row]
    length = int(data["response_lengths"][row])
    arrays = {}
    for key, field in PER_TOKEN.items():
        values = data[key][row] if key in data else None
        if values is not None and len(values) != length:
            raise HookError(
                f"{name}: {key}[{row}] has {len(values)} entries for a response of {length} tokens (response_lengths)"
            )
        arrays[field] = None if values is None else list(values)
    tokens = list(data["tokens"][row])
    if not 0 <= length <= len(tokens):
        raise HookError(f"{name}: response_lengths[{row}] is {length}, and tokens[{row}] has {len(tokens)} entries")
    rollout_id = origin.index if origin.rollout_id is None else origin.rollout_id
    return Sample(
        index=origin.index,
        group_index=int(data["group_indices"][row]) if "group_indices" in data else origin.group_index,
        rollout_id=int(data["rollout_ids"][row]) if "rollout_ids" in data else rollout_id,
        tokens=tokens,
        response_length=length,
        loss_mask=arrays["loss_mask"],
        rollout_log_probs=arrays["rollout_log_probs"],
        weight_versions=arrays["weight_versions"] or [],
        teacher_log_probs=arrays["teacher_log_probs"],
        rollout_routed_experts=data["rollout_routed_experts"][row] if "rollout_routed_experts" in data else None,
        remove_sample=origin.remove_sample,
        status=origin.status,
    )


def _numbers(values: Any) -> np.ndarray:
    """float64 [rows]; None is NaN, as where a sample FAILED."""
    return np.asarray([np.nan if value is None else float(value) for value in values], dtype=np.float64)
