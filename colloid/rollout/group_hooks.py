"""The users' functions that see the groups of a whole rollout, before they are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colloid.data.groups import Group, flatten
from colloid.errors import HookError


def call_group_hooks(args: Any, groups: list[Group], decided: list[Group], data_source: Any) -> None:
    """`--rollout-sample-filter-path` with what is trained, then `--rollout-all-samples-process-path` with all of it.

    Args:
        groups: what is trained; the filter sets `remove_sample` on samples of it.
        decided: these and the ones that the dynamic filter dropped, by sample index.

    Raises:
        HookError: one of them raised, or the filter took samples away.
    """
    if args.rollout_sample_filter_path:
        before = [flatten(group) for group in groups]  # held, so that no other sample gets the address of one
        _load(args, args.rollout_sample_filter_path, "rollout_sample_filter")(groups)
        after = [flatten(group) for group in groups]
        if [list(map(id, group)) for group in after] != [list(map(id, group)) for group in before]:
            raise HookError(
                f"--rollout-sample-filter-path {args.rollout_sample_filter_path} changed the lists that it was given: "
                "it leaves a sample out of training by `sample.remove_sample = True`"
            )
    if args.rollout_all_samples_process_path:
        _load(args, args.rollout_all_samples_process_path, "rollout_all_samples")(decided, data_source)


def load_sample_hooks(args: Any) -> list[Callable[..., Any]]:
    """The functions of `--rollout-sample-hook-path`, in their order, bound to `args`."""
    return [_load(args, path, "rollout_sample_hook") for path in args.rollout_sample_hook_path]


def check_group_hooks(args: Any) -> None:
    """Raises `HookError` where one of the hooks cannot be loaded."""
    kinds = {
        "rollout_sample_filter": args.rollout_sample_filter_path,
        "rollout_all_samples": args.rollout_all_samples_process_path,
        "dynamic_filter": args.dynamic_sampling_filter_path,
        "custom_convert_samples": args.custom_convert_samples_to_train_data_path,
    }
    for kind, path in kinds.items():
        if path:
            _load(args, path, kind)
    load_sample_hooks(args)


def _load(args: Any, path: str, kind: str) -> Callable[..., Any]:
    from colloid.hooks import bind, load_hook

    return bind(load_hook(path, kind), args)
