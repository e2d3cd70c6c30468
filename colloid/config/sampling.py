"""Rules of what is generated: partial rollouts, runs without a data set, the first rollout."""

from __future__ import annotations

from collections.abc import Callable

from colloid.config.args import Args
from colloid.config.asynchrony import CONTINUOUS
from colloid.config.eval_config import evaluates_only
from colloid.config.sft import takes_conversations
from colloid.config.tables import tables

Rule = Callable[[Args], "str | None"]

DEFAULT_ROLLOUT_FUNCTION = "colloid.rollout.generate.generate_rollout"
_OWN_PROMPTS = ("rollout_function_path", "custom_generate_function_path", "data_source_path")


def brings_prompts(args: Args) -> bool:
    """Whether the run has no data set of its own (`--disable-rollout-global-dataset`)."""
    return not args.rollout_global_dataset


def _mask(args: Args) -> str | None:
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        return (
            "--mask-offpolicy-in-partial-rollout has an effect only with --partial-rollout: without it nothing that is "
            "trained was begun in an earlier rollout"
        )
    return None


def _no_dataset(args: Args) -> str | None:
    if not brings_prompts(args) or evaluates_only(args):
        return None
    if not any(dest in args.given for dest in _OWN_PROMPTS):
        return (
            "--disable-rollout-global-dataset leaves the run without prompts; give a function that brings them: "
            "--rollout-function-path, --custom-generate-function-path or --data-source-path"
        )
    if args.prompt_data is not None:
        return (
            f"--prompt-data {args.prompt_data} is not read with --disable-rollout-global-dataset; leave one of them out"
        )
    if args.num_rollout is None and not args.debug_train_only and "data_source_path" not in args.given:
        return "--disable-rollout-global-dataset: nothing says how long the run is; give --num-rollout"
    return None


def _start(args: Args) -> str | None:
    start, count = args.start_rollout_id, args.num_rollout
    if start is not None and count is not None and start >= max(count, 1):
        return f"--start-rollout-id {start} leaves nothing to do: --num-rollout {count} ends with rollout {count - 1}"
    return None


_OF_THE_DEFAULT = (
    "over_sampling_batch_size",
    "partial_rollout",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "rollout_sample_hook_path",
)
"""What the default rollout function does; another one has to do it itself, or to call that."""


def warnings(args: Args) -> list[str]:
    """What another rollout function may leave undone."""
    if "rollout_function_path" not in args.given or takes_conversations(args):
        return []
    undone = _OF_THE_DEFAULT[:1] if args.rollout_function_path == CONTINUOUS else _OF_THE_DEFAULT
    found = [tables().by_dest[dest][0].flag for dest in undone if dest in args.given and getattr(args, dest)]
    if args.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION or not found:
        return []
    return [
        f"--rollout-function-path {args.rollout_function_path}: {', '.join(found)} only has an effect where the "
        f"function sees to it, or calls {DEFAULT_ROLLOUT_FUNCTION}"
    ]


def _agents(args: Args) -> str | None:
    if args.agent_endpoint_host in ("0.0.0.0", "::", ""):
        return (
            f"--agent-endpoint-host is {args.agent_endpoint_host!r}, which is no address that agents can be told: give "
            "that of this machine under which they reach it"
        )
    return None


RULES: tuple[Rule, ...] = (_mask, _no_dataset, _start, _agents)
