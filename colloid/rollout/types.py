"""What rollout functions and filters return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from colloid.data.groups import Group


@dataclass
class RolloutFnTrainOutput:
    """The groups to train on, in order; and metrics of the function's own.

    An element of a group may be a list: one rollout in several parts.
    """

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """By name of the evaluation set: `rewards`, `truncated` and `samples`, three lists of one length."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """Whether a finished group is trained."""

    keep: bool
    reason: str | None = None
    """Counted under `rollout/dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """Whether a dropped group may fill the batch after all, once the bound on tries is reached."""


@dataclass
class RolloutCounts:
    """What became of the groups of one rollout. Nothing is dropped without being counted here.

    submitted = kept - filled + filtered + carried + discarded.
    """

    submitted: int = 0
    """Drawn from the data source; those that came finished from its buffer included."""
    finished: int = 0
    filtered: int = 0
    carried: int = 0
    """Given back to the data source: surplus groups, and aborted ones."""
    discarded: int = 0
    """The same where the data source keeps none."""
    aborted: int = 0
    filled: int = 0
    """Dropped by the filter, and trained after all because too few were left."""
    failed_samples: int = 0
    """Of the groups that were kept or filtered."""
    continued_samples: int = 0
    """Drawn with tokens of an earlier rollout, to go on."""
    partial_samples: int = 0
    """Given back with tokens, to go on later."""
    restarted_samples: int = 0
    """Whose generate function went on after an abort, so that what it made since the start of its call is dropped."""
    stale: int = 0
    """Drawn with tokens of weights that are too old (`--max-staleness`), so that they started anew."""
    reasons: dict[str, int] = field(default_factory=dict)

    def add_filtered(self, reason: str | None) -> None:
        """A group that the dynamic filter dropped."""
        self.filtered += 1
        reason = reason or "filtered"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def metrics(self) -> dict[str, float]:
        values = {
            "rollout/num_submitted_groups": self.submitted,
            "rollout/num_finished_groups": self.finished,
            "rollout/num_filtered_groups": self.filtered,
            "rollout/num_carried_groups": self.carried,
            "rollout/num_discarded_groups": self.discarded,
            "rollout/num_aborted_groups": self.aborted,
            "rollout/num_filled_groups": self.filled,
            "rollout/num_failed_samples": self.failed_samples,
            "rollout/num_continued_samples": self.continued_samples,
            "rollout/num_partial_samples": self.partial_samples,
            "rollout/num_restarted_samples": self.restarted_samples,
            "rollout/num_stale_groups": self.stale,
        }
        values |= {f"rollout/dynamic_filter/drop_{reason}": n for reason, n in self.reasons.items()}
        return {name: float(value) for name, value in values.items()}
