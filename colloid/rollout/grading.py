"""Rewards for samples: which grader, where it runs, for how long; a failed grading is a status, never a 0.

sample ──► --custom-rm-path / sample.custom_rm_path ──► worker process, time limit
      └──► rm_type: the sample's, else the run's ──► quick part in place ──► slow part in a worker, time limit
"""

from __future__ import annotations

import logging
from typing import Any

from colloid.data.sample import Sample, Status
from colloid.errors import ConfigError
from colloid.rewards.custom import apply_changes
from colloid.rewards.pool import GradingFailed, WorkerPool
from colloid.rewards.registry import GradeInput, get_reward, reward_number

logger = logging.getLogger(__name__)

GRADING_TIMEOUT = 60.0


class Grader:
    """Sets `sample.reward`, or marks the sample FAILED.

    Args:
        rm_type: the run's built-in reward; None: none.
        custom_path: the user's reward function; goes before `rm_type`.
        hook_args: handed to the user's function; must be picklable.
        unlabelled: the reward of a sample without a label where nothing says how to reward it; None: an error.
        workers: processes at most, for each of the two kinds.
        timeout: seconds that one grading may take.
    """

    def __init__(
        self,
        *,
        rm_type: str | None,
        custom_path: str | None = None,
        hook_args: Any = None,
        reward_key: str | None = None,
        seed: int = 0,
        unlabelled: float | None = None,
        workers: int = 2,
        timeout: float = GRADING_TIMEOUT,
    ):
        self.rm_type = rm_type
        self.custom_path = custom_path
        self.reward_key = reward_key
        self.timeout = timeout
        self._seed = seed
        self._unlabelled = unlabelled
        self._hook_args = hook_args
        self._workers = workers
        self._builtin_pool = WorkerPool(workers, preload=("colloid.rewards.math:warm_up", ()))
        self._custom_pools: dict[str, WorkerPool] = {}
        self._shown: set[str] = set()

    async def grade(self, sample: Sample, reward_key: str | None = None) -> None:
        """Sets the reward of a finished sample that has none yet.

        Raises:
            ConfigError: the sample names a reward type that does not exist, or nothing says how to reward it.
        """
        if sample.status is Status.FAILED:
            return
        path = sample.custom_rm_path or self.custom_path
        given = sample.reward is not None
        try:
            if not given:
                sample.reward = await (self._custom(path, sample) if path else self._builtin(sample))
            self._check(sample.reward, reward_key or self.reward_key)
        except ConfigError:
            raise
        except (GradingFailed, ValueError) as error:
            culprit = "the generate function's reward" if given else f"reward {path or self._rm_type(sample)}"
            self.mark_failed(sample, culprit, error)

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
        for pool in (self._builtin_pool, *self._custom_pools.values()):
            await pool.close()

    @staticmethod
    def _check(reward: Any, key: str | None) -> None:
        if not isinstance(reward, dict):
            reward_number(reward)
        elif key in reward:
            reward_number(reward[key])
        else:
            raise ConfigError(
                f"rewards are dicts with the keys {sorted(reward)}, and --reward-key is {key!r}: set it to the key to "
                "train on"
            )

    def _rm_type(self, sample: Sample) -> str | None:
        return sample.metadata.get("rm_type") or self.rm_type

    async def _builtin(self, sample: Sample) -> float:
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
        label = None if sample.label is None else str(sample.label)
        quick = entry.quick(GradeInput(sample.response, label, sample.index or 0, self._seed))
        if quick is not None:
            return quick
        return await self._builtin_pool.run(entry.slow, (sample.response, label), self.timeout)

    async def _custom(self, path: str, sample: Sample) -> Any:
        if path not in self._custom_pools:
            self._custom_pools[path] = WorkerPool(
                self._workers,
                tasks_per_worker=64,
                shared={"args": self._hook_args},
                preload=("colloid.rewards.custom:preload", (path,)),
            )
        target = "colloid.rewards.custom:call_custom_reward"
        answer = await self._custom_pools[path].run(target, (path, sample), self.timeout)
        apply_changes(sample, answer["changes"])
        if answer["options_read"]:
            self._hook_args.mark_read(*answer["options_read"])
        return answer["reward"]
