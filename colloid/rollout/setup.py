"""What the manager makes of the options before anything starts: data source, evaluation sets, reward, functions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from colloid.config.sampling import DEFAULT_ROLLOUT_FUNCTION
from colloid.config.services import takes_trajectories
from colloid.config.sft import serves, takes_conversations
from colloid.data.mixture import Mixture
from colloid.data.opening import context_length, load_dataset, prompt_format
from colloid.data.prompts import load_prompts
from colloid.data.reading import LoadOptions
from colloid.data.rows import PromptDataset
from colloid.data.source import RolloutDataSource, RolloutDataSourceWithBuffer
from colloid.data.stream import PromptStream
from colloid.errors import ConfigError
from colloid.rewards.forms import reward_form
from colloid.rewards.registry import get_reward
from colloid.rollout.context import EvalSet
from colloid.rollout.generate import generate_rollout
from colloid.rollout.group_hooks import check_group_hooks
from colloid.rollout.reward_setup import check_reward_functions, check_rewardable
from colloid.rollout.source_calls import prepare_source

logger = logging.getLogger(__name__)

DEFAULT_DATA_SOURCE = "colloid.RolloutDataSourceWithBuffer"


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
    """The evaluation sets, read as each says, and their functions loaded.

    Raises:
        DataError: a file is missing, a row cannot be used, or none is left.
        HookError: a function cannot be loaded.
    """
    options = LoadOptions(args.skip_bad_rows)
    sets = []
    for config in args.eval_datasets:
        limits = [limit for limit in (context_length(args), config.max_context_len) if limit]
        longest = config.max_prompt_len
        if limits:
            room = min(limits) - config.max_response_len
            longest = min(filter(None, [longest, room if room > 0 else min(limits) - 1]))
        eval_format = replace(
            prompt_format(args),
            input_key=config.input_key,
            label_key=config.label_key,
            metadata_key=config.metadata_key,
            tool_key=config.tool_key,
            apply_chat_template=config.apply_chat_template,
            chat_template_kwargs=config.apply_chat_template_kwargs or {},
            max_tokens=longest,
        )
        if config.custom_generate_function_path:
            check_generate_function(config.custom_generate_function_path)
        for path in config.custom_rm_path or []:
            reward_form(path, bool(args.group_rm))
        sets.append(EvalSet(load_prompts(config.path, tokenizer, eval_format, options), config))
    return sets


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


def load_eval_function(args: Any) -> Callable[..., Any] | None:
    """That of `--eval-function-path`, bound to `args`; None: the rollout function evaluates."""
    if args.eval_function_path is None:
        return None
    from colloid.hooks import bind, load_hook

    return bind(load_hook(args.eval_function_path, "eval_function"), args)


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
    for one in eval_sets:
        if one.config.rm_type and not one.config.custom_generate_function_path:
            rows = [replace(row, metadata=row.metadata | one.metadata) for row in one.dataset.rows]
            check_rewardable(rows, one.config.rm_type, args)
    if args.custom_rm_path:
        return args.rm_type
    rm_type = args.rm_type
    readable = (
        isinstance(dataset, (PromptDataset, PromptStream, Mixture))
        and not takes_conversations(args)
        and not takes_trajectories(args)
    )
    rows = dataset.head() if readable else []
    if rm_type is None and readable and all(row.label is None for row in rows):
        if args.use_opd or args.custom_generate_function_path or any("rm_type" in row.metadata for row in rows):
            return None
        raise ConfigError(
            f"{dataset.path} has no labels under {args.label_key!r}, and no reward is given: name the labels' key with "
            "--label-key, or a reward with --custom-rm-path or --rm-type"
        )
    rm_type = rm_type or "math"
    get_reward(rm_type)
    if not args.custom_generate_function_path:
        check_rewardable(rows, rm_type, args)
    for one in eval_sets:
        if not (one.config.rm_type or one.config.custom_rm_path or one.config.custom_generate_function_path):
            check_rewardable(one.dataset.rows, rm_type, args)
    return rm_type
