"""How old tokens are: in weight versions (one is one update of the engines), when they are trained."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

import numpy as np

from colloid.data.batch import RolloutBatch
from colloid.data.groups import Group, flatten
from colloid.data.sample import Sample

NUM_PROMPT_MESSAGES = "num_prompt_messages"
"""In a sample's metadata: messages of its prompt before its generate function appended its own."""


@dataclass
class Versions:
    """What a rollout knows of versions; the manager keeps it up to date.

    Attributes:
        engines: what the engines hold.
        trained: what they will hold when the rollout that is being made is trained. None: not known.
        rollout_id: that rollout.
        max_staleness: how many versions older than that a token may be. None: no bound.
        interval: rollouts between two weight updates.
    """

    engines: int | None = None
    trained: int | None = None
    rollout_id: int = 0
    max_staleness: int | None = None
    interval: int = 1

    @property
    def oldest(self) -> int | None:
        """The oldest version that may be trained; None: any."""
        return None if None in (self.trained, self.max_staleness) else self.trained - self.max_staleness

    def batches_ahead(self, first: int) -> int:
        """How many batches may be started now without a token that is too old when it is trained.

        Args:
            first: the rollout that the first of these batches is for.

        Raises:
            ValueError: without a bound there is no answer.
        """
        if self.max_staleness is None:
            raise ValueError("--max-staleness is not set")
        known = None not in (self.trained, self.engines)
        updates = self.max_staleness - (self.trained - self.engines if known else 0)
        last = (self.rollout_id // self.interval + updates + 1) * self.interval - 1
        return max(0, last - first + 1)


def oldest_version(sample: Sample) -> int | None:
    """The oldest version of the tokens that would be trained; None: there are none, or it is unknown.

    A user's function may record no versions beside its mask. Arrays of other lengths are named where they become
    columns.
    """
    trained = compress(sample.weight_versions, sample.loss_mask) if sample.loss_mask else sample.weight_versions
    return min((version for version in set(trained) if version >= 0), default=None)


def is_stale(group: Group, oldest: int | None) -> bool:
    """Whether a token of the group is older than may be trained."""
    if oldest is None:
        return False
    versions = (oldest_version(sample) for sample in flatten(group))
    return any(version is not None and version < oldest for version in versions)


def restart(group: Group) -> Group:
    """The group as bare prompts again: of a rollout in several parts one, with the number of the rollout."""
    first: dict[int | None, Sample] = {}
    for sample in flatten(group):
        first.setdefault(sample.rollout_id if sample.rollout_id is not None else sample.index, sample)
    for sample in first.values():
        sample.reset_response()
        if isinstance(sample.prompt, list):
            del sample.prompt[sample.metadata.pop(NUM_PROMPT_MESSAGES, len(sample.prompt)) :]
    return list(first.values())


def staleness_metrics(batch: RolloutBatch, trained: int | None) -> dict[str, float]:
    """`staleness/…` over the tokens that are trained: versions that they are old, and spans of one version a sample.

    Args:
        trained: the version that the engines hold when the batch is trained.
    """
    known = batch.loss_mask.astype(bool) & (batch.weight_versions >= 0)
    if trained is None or not known.any():
        return {}
    versions = batch.weight_versions[known]
    sample = np.repeat(np.arange(batch.num_samples), batch.response_lengths)[known]
    new = np.diff(versions) != 0
    spans = len(np.unique(sample)) + int((new & (np.diff(sample) == 0)).sum())
    age = np.maximum(trained - versions, 0)  # engines that were all replaced may have had newer weights
    return {
        "staleness/mean": float(age.mean()),
        "staleness/max": float(age.max()),
        "staleness/spans_per_sample": spans / len(np.unique(sample)),
    }
