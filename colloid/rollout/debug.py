"""Rollouts that lie on disk in place of the rollout manager: `--debug-train-only`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from colloid.config.debug import rollout_file
from colloid.data.sample import Sample
from colloid.errors import DataError
from colloid.rollout.batching import RolloutResult, rewarded, rollout_batch, rollout_result
from colloid.rollout.manager import check_state, write_state
from colloid.rollout.metrics import rollout_metrics
from colloid.rollout.record import load_rollout
from colloid.rollout.runner import check_not_all_failed

logger = logging.getLogger(__name__)


def subsample(samples: Sequence[Sample], share: float, num_steps: int) -> list[Sample]:
    """The first groups of the rollout, about `share` of them, so that their rollouts fill `num_steps` equal steps.

    Groups stay whole: a part of one would have another baseline.

    Raises:
        DataError: no number of groups, up to that share, does.
    """
    groups: dict[int | None, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    for wanted in range(max(1, round(share * len(groups))), 0, -1):
        kept = [sample for group in list(groups.values())[:wanted] for sample in group]
        rollouts = {sample.index if sample.rollout_id is None else sample.rollout_id for sample in kept}
        if len(rollouts) % num_steps == 0:
            return kept
    raise DataError(
        f"--load-debug-rollout-data-subsample {share:g} of {len(groups)} groups does not fill the {num_steps} "
        "optimizer steps of a rollout: take a larger share, or fewer --num-steps-per-rollout"
    )


class LoadedRollouts:
    """What a `RolloutManager` is to the driver, for rollouts that lie on disk: nothing is generated.

    Args:
        args: the run's options.
    """

    def __init__(self, args: Any):
        self._args = args

    def dataset_length(self) -> int:
        """Nothing: the number of rollouts does not come from prompts."""
        return 0

    async def generate(
        self,
        rollout_id: int,
        weight_version: int | None = None,
        *,
        trained: int | None = None,
        after: int | None = None,
    ) -> RolloutResult:
        """The training batches of the rollout's file; the other arguments are not used.

        Raises:
            DataError: see `load_rollout`.
        """
        args = self._args
        path = rollout_file(args.load_debug_rollout_data, rollout_id)
        samples = load_rollout(path)
        share = args.load_debug_rollout_data_subsample
        if share is not None:
            samples = subsample(samples, share, args.num_steps_per_rollout)
        logger.info("rollout %d: %d samples of %s", rollout_id, len(samples), path)
        check_not_all_failed(samples, path)
        batch = rollout_batch(args, samples)
        metrics = rollout_metrics(samples, batch, seconds=None, weight_version=None, rewarded=rewarded(args))
        return replace(rollout_result(args, samples, batch), metrics=metrics)

    def interrupted(self) -> AbstractAsyncContextManager[None]:
        """Nothing runs."""
        return nullcontext()

    def save(self, directory: str | Path, rollout_id: int) -> None:
        """Writes the rollout's number; there is no data source."""
        write_state(directory, rollout_id)

    def load(self, directory: str | Path, rollout_id: int) -> None:
        """Checks that the checkpoint is of this rollout."""
        check_state(directory, rollout_id)

    async def close(self) -> None:
        """Nothing is open."""
