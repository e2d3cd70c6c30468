"""What the manager makes of the options before anything starts: data source, evaluation sets, reward, functions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from colloid.config.sft import serves, takes_conversations
from colloid.data.mixture import Mixture
from colloid.data.opening import context_length, load_dataset, load_options, prompt_format
from colloid.data.prompts import load_prompts
from colloid.data.rows import PromptDataset
from colloid.data.source import RolloutDataSource, RolloutDataSourceWithBuffer
from colloid.data.stream import PromptStream
from colloid.errors import ConfigError
from colloid.rewards.registry import get_reward
from colloid.rollout.context import EvalSet
from colloid.rollout.evaluate import check_eval_names
from colloid.rollout.generate import generate_rollout
from colloid.rollout.group_hooks import check_group_hooks
from colloid.rollout.reward_setup import check_reward_functions, check_rewardable
from colloid.rollout.source_calls import prepare_source

logger = logging.getLogger(__name__)

DEFAULT_DATA_SOURCE = "colloid.RolloutDataSourceWithBuffer"
DEFAULT_ROLLOUT_FUNCTION = "colloid.rollout.generate.generate_rollout"


def make_data_source(args: Any) -> Any:
    """The data source that the options name; a user's class is made with `args`, or without where it takes nothing."""
    context = context_length(args)
    if context and args.rollout_max_response_len >= context and serves(args):
        logger.warning(
            "--rollout-max-response-len %d does not fit the context of %d tokens: responses end where the context does",
            *(args.rollout_max_response_len, context),
        )
    source = _data_source_of(args)
    prepare_source(args, source)
    return source


def _data_source_of(args: Any) -> Any:
    if args.data_source_path in (None, DEFAULT_DATA_SOURCE):
        return RolloutDataSourceWithBuffer(args)
    if args.data_source_path == "colloid.RolloutDataSource":
        return RolloutDataSource(args)
    from colloid.hooks import load_class

    source_class = load_class(args.data_source_path, "data_source")
    takes_args = bool(inspect.signature(source_class).parameters)
    source = source_class(args) if takes_args else source_class()
    wanted = args.prompt_data and args.rollout_global_dataset
    if isinstance(source, RolloutDataSource) and source.dataset is None and wanted:
        source.dataset = load_dataset(args)
    return source


def load_eval_sets(args: Any, tokenizer: Any) -> list[EvalSet]:
    """The evaluation sets, read with the `eval_…` keys where those are given."""
    training = prompt_format(args)
    limits = [limit for limit in (context_length(args), args.eval_max_context_len) if limit]
    longest = args.eval_max_prompt_len or args.rollout_max_prompt_len
    if limits:
        response = args.eval_max_response_len or args.rollout_max_response_len
        room = min(limits) - response
        longest = min(filter(None, [longest, room if room > 0 else min(limits) - 1]))
    eval_format = replace(
        training,
        input_key=args.eval_input_key or training.input_key,
        label_key=args.eval_label_key or training.label_key,
        tool_key=args.eval_tool_key or training.tool_key,
        max_tokens=longest,
    )
    pairs = [(str(name), str(path)) for name, path in (args.eval_prompt_data or [])]
    check_eval_names([name for name, _ in pairs])
    return [EvalSet(name, load_prompts(path, tokenizer, eval_format, load_options(args))) for name, path in pairs]


def load_rollout_function(args: Any) -> Callable[..., Any]:
    """`(rollout_id, data_source, evaluation=…)`, bound to `args`."""
    if args.custom_generate_function_path:
        check_generate_function(args.custom_generate_function_path)
    check_group_hooks(args)
    if args.rollout_function_path in (None, DEFAULT_ROLLOUT_FUNCTION):

        async def default(rollout_id: int, data_source: Any, evaluation: bool = False):
            return await generate_rollout(args, rollout_id, data_source, evaluation=evaluation)

        return default
    from colloid.hooks import bind, load_hook

    return bind(load_hook(args.rollout_function_path, "rollout_function"), args)


def check_generate_function(path: str) -> None:
    """Raises `HookError` where there is no such function."""
    from colloid.hooks import load_hook

    load_hook(path, "custom_generate")


def resolve_rm_type(args: Any, dataset: Any, eval_sets: list[EvalSet]) -> str | None:
    """The run's built-in reward: the one given, else `math` where rows have labels.

    Of streamed data the first rows are looked at.

    Raises:
        ConfigError, DataError: no reward is possible, or rows lack what theirs needs.
    """
    check_reward_functions(args)
    if args.custom_rm_path:
        return args.rm_type
    rm_type = args.rm_type
    readable = isinstance(dataset, (PromptDataset, PromptStream, Mixture)) and not takes_conversations(args)
    rows = dataset.head() if readable else []
    if rm_type is None and readable and all(row.label is None for row in rows):
        if args.custom_generate_function_path or any("rm_type" in row.metadata for row in rows):
            return None
        raise ConfigError(
            f"{dataset.path} has no labels under {args.label_key!r}, and no reward is given: name the labels' key with "
            "--label-key, or a reward with --custom-rm-path or --rm-type"
        )
    rm_type = rm_type or "math"
    get_reward(rm_type)
    if not args.custom_generate_function_path:
        for one in (rows, *(eval_set.dataset.rows for eval_set in eval_sets)):
            check_rewardable(one, rm_type, args)
    return rm_type
