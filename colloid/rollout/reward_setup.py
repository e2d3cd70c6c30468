"""What the grader is made of, and what rows and functions must be like for it, found out before anything starts."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable
from typing import Any

from colloid.config.algorithm import has_teacher_engine
from colloid.data.rows import PromptRow
from colloid.errors import ConfigError, DataError
from colloid.rewards.forms import Form, constructor_takes_path, reward_form
from colloid.rewards.registry import BOXED, REWARDS, get_reward, is_remote

logger = logging.getLogger(__name__)


def grader_options(args: Any, rm_type: str | None) -> dict[str, Any]:
    """The arguments of `Grader`."""
    return {
        "rm_type": rm_type,
        "custom_path": args.custom_rm_path,
        "custom_weights": args.custom_rm_weights,
        "model_path": args.custom_rm_model_path or args.hf_checkpoint,
        "hook_args": args,
        "reward_key": args.reward_key,
        "group_rm": bool(args.group_rm),
        "deterministic": bool(args.deterministic),
        "rm_url": args.rm_url,
        "proxy": args.http_proxy,
        "seed": args.rollout_seed,
        "unlabelled": 0.0 if args.use_opd else None,  # the teacher is enough to learn from
        "workers": max(1, min(8, (os.cpu_count() or 2) // 2)),
    }


def custom_paths(args: Any) -> list[str]:
    """The paths of `--custom-rm-path`."""
    paths = args.custom_rm_path or []
    return [paths] if isinstance(paths, str) else list(paths)


def check_reward_functions(args: Any) -> None:
    """Loads the user's rewards.

    Raises:
        HookError: one cannot be loaded, or be called as any form.
        ConfigError: it lacks what its form needs, or several are not all functions of prompts and responses.
    """
    forms = {path: reward_form(path, bool(args.group_rm)) for path in custom_paths(args)}
    if len(forms) > 1 or args.custom_rm_weights:
        other = [path for path, form in forms.items() if not form.batched]
        if other:
            raise ConfigError(
                f"--custom-rm-path {', '.join(other)}: several rewards are added up where each is a function "
                "`(prompts, responses, **columns) -> list[float]` or a class with compute_reward"
            )
    models = [path for path, form in forms.items() if form is Form.MODEL]
    if args.custom_rm_model_path and not models:
        raise ConfigError(f"--custom-rm-model-path {args.custom_rm_model_path} needs a class at --custom-rm-path")
    for path in models:
        _check_model_path(args, path)
    if args.custom_reward_post_process_path:
        from colloid.hooks import load_hook

        load_hook(args.custom_reward_post_process_path, "custom_reward_post_process")


def _check_model_path(args: Any, path: str) -> None:
    from colloid.hooks import load_hook_or_class

    model = load_hook_or_class(path, "custom_rm")
    assert inspect.isclass(model)
    takes_path = constructor_takes_path(model)
    if args.custom_rm_model_path and not takes_path:
        raise ConfigError(
            f"--custom-rm-model-path {args.custom_rm_model_path}: {model.__name__} of {path} takes no path; leave it "
            "out"
        )
    if takes_path and not args.custom_rm_model_path:
        logger.warning(
            "no --custom-rm-model-path: %s(model_path) of %s gets --hf-checkpoint %s",
            *(model.__name__, path, args.hf_checkpoint),
        )


def check_rewardable(rows: Iterable[PromptRow], rm_type: str, args: Any) -> None:
    """
    Raises:
        DataError: a row names a reward that does not exist, or lacks what its reward needs.
        ConfigError: its reward needs `--rm-url`, or would ask a teacher there.
    """
    for row in rows:
        name = row.metadata.get("rm_type") or rm_type
        if str(name).removeprefix(BOXED) not in REWARDS:
            raise DataError(
                f"{row.where}: unknown reward type {name!r} in the metadata; known: {', '.join(REWARDS)}, also after "
                f"{BOXED}"
            )
        reward = get_reward(name)
        if is_remote(name) and not args.rm_url:
            raise ConfigError(f"{row.where}: the reward {name!r} needs --rm-url, the server's address")
        if is_remote(name) and has_teacher_engine(args):
            raise ConfigError(
                f"{row.where}: the reward {name!r} asks the server at --rm-url, which with --opd-type sglang is the "
                "teacher's: reward with --custom-rm-path, or give the teacher with --opd-teacher-load"
            )
        if reward.needs_label and row.label is None:
            raise DataError(
                f"{row.where}: no label under {args.label_key!r}, and the reward {name!r} needs one. "
                "Name the labels' key with --label-key, or a reward with --custom-rm-path or --rm-type"
            )
        problem = reward.problem(row.label, row.metadata) if reward.problem else None
        if problem:
            raise DataError(f"{row.where}: the reward {name!r}: {problem}")
