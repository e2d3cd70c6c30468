"""What the manager makes of the options before anything starts: data source, evaluation sets, reward, functions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from colloid.config.sft import serves, takes_conversations
from colloid.data.prompts import PromptDataset, load_prompts
from colloid.data.source import (
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    context_length,
    load_dataset,
    prompt_format,
)
from colloid.errors import ConfigError, DataError
from colloid.rewards.registry import REWARDS, get_reward
from colloid.rollout.context import EvalSet
from colloid.rollout.evaluate import check_eval_names
from colloid.rollout.generate import generate_rollout

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
    if args.data_source_path in (None, DEFAULT_DATA_SOURCE):
        return RolloutDataSourceWithBuffer(args)
    if args.data_source_path == "colloid.RolloutDataSource":
        return RolloutDataSource(args)
    from colloid.hooks import load_class

    source_class = load_class(args.data_source_path, "data_source")
    takes_args = bool(inspect.signature(source_class).parameters)
    source = source_class(args) if takes_args else source_class()
    if isinstance(source, RolloutDataSource):
        source.args = source.args or args
        if source.dataset is None and type(source).get_samples is RolloutDataSource.get_samples:
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
    return [EvalSet(name, load_prompts(path, tokenizer, eval_format)) for name, path in pairs]


def load_rollout_function(args: Any) -> Callable[..., Any]:
    """`(rollout_id, data_source, evaluation=…)`, bound to `args`."""
    if args.custom_generate_function_path:
        check_generate_function(args.custom_generate_function_path)
    if args.dynamic_sampling_filter_path:
        from colloid.hooks import load_hook

        load_hook(args.dynamic_sampling_filter_path, "dynamic_filter")
    if args.rollout_function_path in (None, DEFAULT_ROLLOUT_FUNCTION):

        async def default(rollout_id: int, data_source: Any, evaluation: bool = False):
            return await generate_rollout(args, rollout_id, data_source, evaluation=evaluation)

        return default
    from colloid.hooks import bind, load_hook

    return bind(load_hook(args.rollout_function_path, "rollout_function"), args)


def check_generate_function(path: str) -> None:
    """Raises `ConfigError` for the form that takes the whole group."""
    from colloid.hooks import load_hook

    hook = load_hook(path, "custom_generate")
    names = list(inspect.signature(hook.target).parameters)
    if names[1:2] == ["samples"]:
        raise ConfigError(
            f"--custom-generate-function-path {path}: the form `custom_generate(args, samples)` is not supported yet; "
            "write `async custom_generate(args, sample, sampling_params)` for one sample"
        )


def resolve_rm_type(args: Any, dataset: PromptDataset | None, eval_sets: list[EvalSet]) -> str | None:
    """The run's built-in reward: the one given, else `math` where rows have labels.

    Raises:
        ConfigError, DataError: no reward is possible, or rows lack what theirs needs.
    """
    if args.custom_rm_path:
        check_reward_function(args.custom_rm_path)
        return args.rm_type
    rm_type = args.rm_type
    known = dataset if isinstance(dataset, PromptDataset) and not takes_conversations(args) else None
    if rm_type is None and known is not None and not known.has_labels():
        if args.use_opd or args.custom_generate_function_path or any("rm_type" in row.metadata for row in known.rows):
            return None
        raise ConfigError(
            f"{known.path} has no labels under {args.label_key!r}, and no reward is given: name the labels' key with "
            "--label-key, or a reward with --custom-rm-path or --rm-type"
        )
    rm_type = rm_type or "math"
    get_reward(rm_type)
    if not args.custom_generate_function_path:
        for one in filter(None, [known, *(eval_set.dataset for eval_set in eval_sets)]):
            _check_rows(one, rm_type, args)
    return rm_type


def check_reward_function(path: str) -> None:
    """Raises `ConfigError` for the forms of `--custom-rm-path` that are not built yet."""
    from colloid.hooks import load_hook

    names = list(inspect.signature(load_hook(path, "custom_rm").target).parameters)
    if names[:1] == ["prompts"] or names[1:2] in (["samples"], ["responses"], ["completions"]):
        raise ConfigError(
            f"--custom-rm-path {path}: a function of ({', '.join(names[:2])}, …) is not supported yet; write "
            "`async def reward_func(args, sample, **kw)` that returns a number"
        )


def _check_rows(dataset: PromptDataset, rm_type: str, args: Any) -> None:
    for row in dataset.rows:
        name = row.metadata.get("rm_type") or rm_type
        if name not in REWARDS:
            raise DataError(
                f"{dataset.path}:{row.line}: unknown reward type {name!r} in the metadata; known: {', '.join(REWARDS)}"
            )
        if REWARDS[name].needs_label and row.label is None:
            raise DataError(
                f"{dataset.path}:{row.line}: no label under {args.label_key!r}, and the reward {name!r} needs one. "
                "Name the labels' key with --label-key, or a reward with --custom-rm-path or --rm-type"
            )
