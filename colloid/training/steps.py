"""What a rank knows of a rollout's optimizer steps before the first of them, and the form in which hooks see it.

Hooks see samples: lists with an entry for each sample that this rank trains, step after step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from colloid.data.batch import StepTotals
from colloid.errors import HookError
from colloid.training.micro_batch import MicroBatch

Lists = dict[str, list]

COLUMNS = {
    "log_probs": "old",
    "ref_log_probs": "reference",
    "advantages": "advantages",
    "returns": "returns",
    "entropy": "entropy",
}
"""Key of `rollout_data` -> attribute of `Step`."""


@dataclass(frozen=True)
class Step:
    """A step's micro-batches, and what is known of the response tokens [R] of each before the rollout's first step.
    The lists are empty where this is not the last pipeline stage; None: not computed.
    """

    micro_batches: list[MicroBatch]
    totals: StepTotals | None
    """Denominators of the step's global batch."""
    old: list[torch.Tensor] | None = None
    """The behaviour policy's log-probs, where they are not those of the step's own forward pass."""
    reference: list[torch.Tensor] | None = None
    advantages: list[torch.Tensor] | None = None
    returns: list[torch.Tensor] | None = None
    """Where there is a critic."""
    gaps: list[torch.Tensor] | None = None
    """To the teacher, where there is one."""
    entropy: list[torch.Tensor] | None = None
    """Of the behaviour policy, where `--use-rollout-entropy` asks for it."""


def by_sample(values: torch.Tensor, micro_batch: MicroBatch) -> list[torch.Tensor]:
    """[R] -> a tensor for each sample's response."""
    return list(values.split(micro_batch.response_lengths.tolist()))


def flat(values: Any, like: torch.Tensor, function: Any, what: str) -> torch.Tensor:
    """[R]: a tensor [R], a list with a tensor for each sample, or a number.

    Raises:
        HookError: it has another shape than `like`; names the function and what it is.
    """
    if isinstance(values, (list, tuple)):
        values = torch.cat([torch.as_tensor(own).reshape(-1) for own in values]) if values else like[:0]
    found = torch.as_tensor(values, device=like.device)
    if not found.ndim:
        found = found.expand(len(like))
    if found.shape != like.shape:
        raise HookError(f"{named(function)}: {what} has the shape {list(found.shape)} for {len(like)} response tokens")
    return found


def named(function: Any) -> str:
    """A user's function, for messages."""
    return getattr(function, "name", repr(function))


def shown(value: Any) -> str:
    """What a user's function returned, for messages."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__


def sample_lists(step: Step, row: int) -> Lists:
    """The samples of a micro-batch: `tokens` (int64, prompt and response), `total_lengths`, `response_lengths`,
    `rewards` (shaped), `loss_masks` (float32), and where they are known `rollout_log_probs` and the keys of `COLUMNS`:
    tensors over the response tokens.
    """
    part = step.micro_batches[row]
    lists: Lists = {
        "tokens": list(part.sample_tokens.split(part.lengths.tolist())),
        "total_lengths": part.lengths.tolist(),
        "response_lengths": part.response_lengths.tolist(),
        "rewards": part.rewards.tolist(),
        "loss_masks": by_sample(part.loss_mask.to(torch.float32), part),
    }
    if part.rollout_log_probs is not None:
        lists["rollout_log_probs"] = by_sample(part.rollout_log_probs, part)
    for key, attribute in COLUMNS.items():
        if known := getattr(step, attribute):
            lists[key] = by_sample(known[row], part)
    return lists


def rollout_data(steps: Sequence[Step]) -> Lists:
    """`sample_lists` of all steps one after another, with `steps`: which of them trains the sample. Keys that are not
    known of every sample are left out.
    """
    parts = [sample_lists(step, row) for step in steps for row in range(len(step.micro_batches))]
    keys = [key for key in (parts[0] if parts else ()) if all(key in part for part in parts)]
    data: Lists = {key: [value for part in parts for value in part[key]] for key in keys}
    data["steps"] = [index for index, step in enumerate(steps) for part in step.micro_batches for _ in part.lengths]
    return data


def postprocessed(function: Callable[..., Any], rollout_id: int, steps: Sequence[Step]) -> list[Step]:
    """The steps as `--rollout-data-postprocess-path` left them: it may change `loss_masks` (to mask more: denominators
    stay as they are), `rollout_log_probs` and the keys of `COLUMNS`.

    Args:
        function: with `args` bound; called with the rollout's id and `rollout_data`.

    Raises:
        HookError: what it left does not fit, or a token that was masked is no longer.
    """
    data = rollout_data(steps)
    function(rollout_id, data)
    changed, first = [], 0
    for step in steps:
        found: dict[str, list[torch.Tensor]] = {}
        parts = []
        for part in step.micro_batches:
            rows = slice(first, first + part.num_samples)
            first += part.num_samples
            parts.append(_part(part, data, rows, function))
            for key, attribute in COLUMNS.items():
                if key in data:
                    before = getattr(step, attribute)
                    like = before[len(parts) - 1] if before else part.token_weights
                    values = flat(data[key][rows], like, function, key)
                    found.setdefault(attribute, []).append(values.to(like.dtype))
        changed.append(replace(step, micro_batches=parts, **found))
    return changed


def _part(part: MicroBatch, data: Lists, rows: slice, function: Any) -> MicroBatch:
    mask = flat(data["loss_masks"][rows], part.token_weights, function, "loss_masks") != 0
    if (mask & ~part.loss_mask).any():
        raise HookError(f"{named(function)} unmasks tokens that are not trained; it may only mask more")
    weights = torch.where(mask, part.token_weights, 0.0)
    rollout = part.rollout_log_probs
    if rollout is not None and "rollout_log_probs" in data:
        rollout = flat(data["rollout_log_probs"][rows], rollout, function, "rollout_log_probs").to(rollout.dtype)
    return replace(part, loss_mask=mask, token_weights=weights, rollout_log_probs=rollout)


def save_rollout_data(path: str, rollout_id: int, rank: int, steps: Sequence[Step]) -> None:
    """Writes `{rollout_id, rank, rollout_data}` with `torch.save`: tensors, lists and numbers alone."""
    file = Path(path.format(rollout_id=rollout_id, rank=rank))
    file.parent.mkdir(parents=True, exist_ok=True)
    data = {
        key: [value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value for value in values]
        for key, values in rollout_data(steps).items()
    }
    torch.save({"rollout_id": rollout_id, "rank": rank, "rollout_data": data}, file)
