"""Rewards for samples: which grader, where it runs, for how long; a failed grading is a status, never a 0.

sample ──► --custom-rm-path / sample.custom_rm_path ──► worker process, time limit (by sample, group or batch)
      └──► rm_type: the sample's, else the run's ──► quick part in place ──► slow part in a worker, time limit
                                                └──► remote_rm: the server at --rm-url, deadline
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from colloid.data.sample import Sample, Status, reward_entry
from colloid.errors import ConfigError
from colloid.rewards.forms import reward_form
from colloid.rewards.judges import CustomRewards, JudgeOptions
from colloid.rewards.pool import GradingFailed, WorkerPool
from colloid.rewards.registry import GradeInput, get_reward, graded_part, is_remote, reward_number
from colloid.rewards.remote import RemoteReward

logger = logging.getLogger(__name__)

GRADING_TIMEOUT = 60.0


class Grader:
    """Sets `sample.reward`, or marks the sample FAILED.

    Args:
        rm_type: the run's built-in reward; None: none.
        custom_path: the user's reward; goes before `rm_type`. Several: their sum, with `custom_weights`.
        model_path: what a reward model's class is made with.
        hook_args: handed to the user's function; must be picklable.
        group_rm: the user's reward takes whole groups.
        deterministic: batches are groups, so that they do not depend on what finishes first.
        rm_url: the server of `remote_rm`.
        proxy: through which it is asked.
        unlabelled: the reward of a sample without a label where nothing says how to reward it; None: an error.
        workers: processes at most, for each of the two kinds.
        timeout: seconds that one grading may take.
    """

    def __init__(
        self,
        *,
        rm_type: str | None,
        custom_path: str | Sequence[str] | None = None,
        custom_weights: Sequence[float] | None = None,
        model_path: str | None = None,
        hook_args: Any = None,
        reward_key: str | None = None,
        group_rm: bool = False,
        deterministic: bool = False,
        rm_url: str | None = None,
        proxy: str | None = None,
        seed: int = 0,
        unlabelled: float | None = None,
        workers: int = 2,
        timeout: float = GRADING_TIMEOUT,
    ):
        self.rm_type = rm_type
        self.custom_paths = [custom_path] if isinstance(custom_path, str) else list(custom_path or [])
        self.reward_key = reward_key
        self.timeout = timeout
        self._seed = seed
        self._unlabelled = unlabelled
        self._builtin_pool = WorkerPool(workers, preload=("colloid.rewards.math:warm_up", ()))
        options = JudgeOptions(hook_args, model_path, workers, timeout, group_rm)
        self._custom = CustomRewards(self.custom_paths, custom_weights, options)
        self._remote = RemoteReward(rm_url, proxy=proxy) if rm_url else None
        self._shown: set[str] = set()
        batched = deterministic and any(reward_form(path, group_rm).batched for path in self.custom_paths)
        self.whole_groups = group_rm or batched
        """Whether `grade_group` is to be called, once all samples of a group have finished, rather than `grade`."""

    async def grade(self, sample: Sample, reward_key: str | None = None) -> None:
        """Sets the reward of a finished sample that has none yet.

        Raises:
            ConfigError: the sample names a reward type that does not exist, or nothing says how to reward it.
        """
        if sample.status is Status.FAILED:
            return
        given = sample.reward is not None
        culprit = "the generate function's reward" if given else self._culprit(sample)
        try:
            reward = sample.reward if given else await self._reward(sample)
        except GradingFailed as error:
            self.mark_failed(sample, culprit, error)
        else:
            self._set(sample, reward, culprit, reward_key)

    async def grade_group(self, samples: Sequence[Sample], reward_key: str | None = None) -> None:
        """The same for all samples of a group, judged together; those that failed before are not among them."""
        waiting = [sample for sample in samples if sample.status is not Status.FAILED and sample.reward is None]
        alone = [sample for sample in samples if not any(sample is one for one in waiting)]
        for path in {sample.custom_rm_path: None for sample in waiting}:
            chosen = [sample for sample in waiting if sample.custom_rm_path == path]
            if path is None and not self.custom_paths:
                alone += chosen
                continue
            for sample, outcome in zip(chosen, await self._custom.group(chosen, path), strict=True):
                if isinstance(outcome, GradingFailed):
                    self.mark_failed(sample, self._culprit(sample), outcome)
                else:
                    self._set(sample, outcome, self._culprit(sample), reward_key)
        await asyncio.gather(*(self.grade(sample, reward_key) for sample in alone))

    def mark_failed(self, sample: Sample, culprit: str, error: BaseException, traceback: str = "") -> None:
        """Marks the sample; the first failure of each kind is logged with its traceback."""
        sample.status = Status.FAILED
        sample.reward = None
        sample.metadata["error"] = f"{culprit}: {error}"
        kind = f"{culprit}: {type(error).__name__}"
        if kind in self._shown:
            logger.debug("sample %s failed: %s: %s", sample.index, culprit, error)
            return
        self._shown.add(kind)
        traceback = traceback or getattr(error, "traceback", "")
        logger.warning(
            "sample %s FAILED (%s: %s); it has no vote, later failures of this kind are counted only%s",
            *(sample.index, culprit, error, "\n" + traceback if traceback else ""),
        )

    async def close(self) -> None:
        """Ends all workers and connections."""
        await self._builtin_pool.close()
        await self._custom.close()
        if self._remote is not None:
            await self._remote.close()

    def _set(self, sample: Sample, reward: Any, culprit: str, key: str | None) -> None:
        """Sets the reward; what is no number (None, a text, NaN) fails its sample."""
        sample.reward = reward
        try:
            self._check(reward, key or self.reward_key)
        except ConfigError:
            raise
        except ValueError as error:
            self.mark_failed(sample, culprit, error)

    @staticmethod
    def _check(reward: Any, key: str | None) -> None:
        if not isinstance(reward, dict):
            reward_number(reward)
            return
        entry = reward_entry(reward, key)
        if entry not in reward:
            raise ConfigError(
                f"rewards are dicts with the keys {sorted(reward)}, and --reward-key is {key!r}: set it to the key to "
                "train on"
            )
        reward_number(reward[entry])

    def _rm_type(self, sample: Sample) -> str | None:
        return sample.metadata.get("rm_type") or self.rm_type

    def _culprit(self, sample: Sample) -> str:
        path = sample.custom_rm_path or ", ".join(self.custom_paths)
        return f"reward {path or self._rm_type(sample)}"

    async def _reward(self, sample: Sample) -> Any:
        if sample.custom_rm_path or self.custom_paths:
            return await self._custom.sample(sample, sample.custom_rm_path)
        return await self._builtin(sample)

    async def _builtin(self, sample: Sample) -> Any:
        name = self._rm_type(sample)
        if name is None and self._unlabelled is not None:
            if sample.label is None:
                return self._unlabelled
            name = "math"
        if name is None:
            raise ConfigError(
                f"sample {sample.index} has no reward: give --rm-type, --custom-rm-path, or labels (--label-key), or "
                "set sample.reward in the generate function"
            )
        entry = get_reward(name)
        if entry.needs_label and sample.label is None:
            raise ConfigError(f"sample {sample.index} has no label, and the reward {name!r} needs one; see --label-key")
        given = GradeInput(sample.response, sample.label, sample.index or 0, self._seed, sample.metadata)
        given = graded_part(name, given)
        if is_remote(name):
            if self._remote is None:
                raise ConfigError(f"sample {sample.index}: the reward {name!r} needs --rm-url, the server's address")
            return await self._remote.reward(sample.prompt, given.response, sample.label, sample.metadata)
        quick = entry.quick(given)
        if quick is not None:
            return quick
        return await self._builtin_pool.run(entry.slow, (given.response, given.label, given.metadata), self.timeout)
