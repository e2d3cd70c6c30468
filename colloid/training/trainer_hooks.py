"""The user's functions that a trainer rank calls while it trains, and what it saves for debugging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from colloid.hooks import bind, load_hook
from colloid.training.steps import Step, postprocessed, save_rollout_data


class TrainerHooks:
    """Those that `args` names; each method does nothing where there is none.

    Raises:
        HookError: one cannot be loaded.
    """

    def __init__(self, args: Any):
        self._postprocess = _hook(args, args.rollout_data_postprocess_path, "rollout_data_postprocess")
        self._before_log_prob = _hook(args, args.custom_megatron_before_log_prob_hook_path, "before_log_prob")
        self._before_train_step = _hook(args, args.custom_megatron_before_train_step_hook_path, "before_train_step")
        self._train_data = args.save_debug_train_data

    @property
    def sees_log_probs(self) -> bool:
        """Whether a function looks at log-probs that training itself does without."""
        return self._postprocess is not None

    def before_log_prob(self, model: list[Any], store_prefix: str) -> None:
        """Before a pass without gradient.

        Args:
            model: the chunks of this rank, with the weights that are about to be used.
            store_prefix: whose log-probs they are: "" the policy's, "ref_", "teacher_".
        """
        if self._before_log_prob:
            self._before_log_prob(model, store_prefix)

    def before_train_step(
        self, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, scheduler: Any
    ) -> None:
        """Before an optimizer step's forward and backward."""
        if self._before_train_step:
            self._before_train_step(rollout_id, step_id, model, optimizer, scheduler)

    def after_log_probs(self, rollout_id: int, rank: int, steps: Sequence[Step]) -> list[Step]:
        """Once everything is known that a rollout's steps need, where the loss is computed; returns what is trained."""
        if self._postprocess:
            steps = postprocessed(self._postprocess, rollout_id, steps)
        if self._train_data:
            save_rollout_data(self._train_data, rollout_id, rank, steps)
        return list(steps)


def _hook(args: Any, path: str | None, kind: str) -> Callable[..., Any] | None:
    return bind(load_hook(path, kind), args) if path else None
