"""Rollouts that are finished and not trained yet: they are part of a checkpoint, and are not generated again."""

from __future__ import annotations

from pathlib import Path

import orjson

from colloid.data.groups import Group
from colloid.data.sample import Sample
from colloid.errors import CheckpointError
from colloid.rollout.staleness import is_stale
from colloid.rollout.types import RolloutFnTrainOutput

STATE_FILE = "waiting_rollouts.json"


class WaitingRollouts:
    """What the rollout function returned, by rollout, until it is trained.

    With synchronous training there is none where a checkpoint is saved; with asynchronous training as many as the
    rollout is ahead.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, RolloutFnTrainOutput] = {}

    def add(self, rollout_id: int, output: RolloutFnTrainOutput) -> None:
        self._outputs[rollout_id] = output

    def get(self, rollout_id: int) -> RolloutFnTrainOutput | None:
        """The rollout, if it is finished already (it comes from a checkpoint)."""
        return self._outputs.get(rollout_id)

    def take_stale(self, rollout_id: int, oldest: int | None) -> list[Group]:
        """The rollout's groups, no longer waiting, where one has tokens of a version before `oldest`; else none."""
        output = self._outputs.get(rollout_id)
        if output is None or not any(is_stale(group, oldest) for group in output.samples):
            return []
        return self._outputs.pop(rollout_id).samples

    def forget(self, trained: int) -> None:
        """Rollouts up to `trained` have been trained."""
        for rollout_id in [one for one in self._outputs if one <= trained]:
            del self._outputs[rollout_id]

    def save(self, directory: str | Path) -> None:
        """Writes the rollouts, with samples and metrics, into `directory`."""
        data = {
            str(rollout_id): {"groups": [_plain(group) for group in output.samples], "metrics": output.metrics}
            for rollout_id, output in self._outputs.items()
        }
        try:
            Path(directory, STATE_FILE).write_bytes(orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY))
        except TypeError as error:
            raise CheckpointError(
                f"the rollouts {sorted(self._outputs)}, which wait to be trained, cannot be saved: a sample (its "
                f"metadata, label or reward) or the rollout's metrics hold what JSON cannot: {error}"
            ) from error

    def load(self, directory: str | Path) -> None:
        """The inverse of `save`; a checkpoint without the file has none."""
        path = Path(directory, STATE_FILE)
        data = orjson.loads(path.read_bytes()) if path.exists() else {}
        self._outputs = {
            int(rollout_id): RolloutFnTrainOutput([_group(group) for group in found["groups"]], found["metrics"])
            for rollout_id, found in data.items()
        }


def _plain(group: list) -> list:
    return [_plain(item) if isinstance(item, list) else item.to_dict() for item in group]


def _group(group: list) -> list:
    return [_group(item) if isinstance(item, list) else Sample.from_dict(item) for item in group]
