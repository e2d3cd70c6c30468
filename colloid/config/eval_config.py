"""Evaluation sets: those of `--eval-prompt-data` and of `--eval-config`, each with all its settings.

A setting is that of the set, else that of the file's `defaults`, else the `--eval-…` option, else the rollout's.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from colloid.config.args import Args
from colloid.config.files import read_config
from colloid.config.model import is_torch_dist
from colloid.config.option import Option
from colloid.config.prompt_files import parse_prompt_file, unreadable
from colloid.config.tables import tables
from colloid.errors import ConfigError

Rule = Callable[[Args], "str | None"]


@dataclass(frozen=True)
class EvalDatasetConfig:
    """One evaluation set, with nothing left open."""

    name: str
    path: str
    """As in `--prompt-data`: `file` or `file@[a:b]`."""
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    max_prompt_len: int | None
    max_context_len: int | None
    min_new_tokens: int | None
    stop: list[str] | None
    stop_token_ids: list[int] | None
    input_key: str
    label_key: str | None
    tool_key: str
    metadata_key: str
    apply_chat_template: bool
    apply_chat_template_kwargs: dict[str, Any]
    rm_type: str | None
    """Overrides the reward of rows. None: the run's reward, unless there is a `custom_rm_path`."""
    custom_rm_path: list[str] | None
    reward_key: str | None
    custom_generate_function_path: str | None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    """Put into the metadata of every sample."""
    source: str = "--eval-prompt-data"
    """The option that names the set."""


SETTINGS = {
    "n_samples_per_eval_prompt": "--n-samples-per-eval-prompt",
    "temperature": "--eval-temperature",
    "top_p": "--eval-top-p",
    "top_k": "--eval-top-k",
    "max_response_len": "--eval-max-response-len",
    "max_prompt_len": "--eval-max-prompt-len",
    "max_context_len": "--eval-max-context-len",
    "min_new_tokens": "--eval-min-new-tokens",
    "stop": "--rollout-stop",
    "stop_token_ids": "--rollout-stop-token-ids",
    "input_key": "--eval-input-key",
    "label_key": "--eval-label-key",
    "tool_key": "--eval-tool-key",
    "metadata_key": "--metadata-key",
    "apply_chat_template": "--apply-chat-template",
    "apply_chat_template_kwargs": "--apply-chat-template-kwargs",
    "rm_type": "--rm-type",
    "custom_rm_path": "--custom-rm-path",
    "reward_key": "--eval-reward-key",
    "custom_generate_function_path": "--custom-generate-function-path",
}
"""Key of a set -> the option whose values it takes, and whose value it has where it is not given."""

_REWARD = ("rm_type", "custom_rm_path")
"""Without these a set has the run's reward."""
_ALIASES = {"prompt_key": "input_key"}
_FILES = (".jsonl", ".json", ".parquet", ".pq")
_OTHER_KEYS = ("name", "path", "metadata_overrides")

_FALLBACKS = {
    "eval_temperature": "rollout_temperature",
    "eval_top_p": "rollout_top_p",
    "eval_top_k": "rollout_top_k",
    "eval_max_response_len": "rollout_max_response_len",
    "eval_max_prompt_len": "rollout_max_prompt_len",
    "eval_max_context_len": "rollout_max_context_len",
    "eval_input_key": "input_key",
    "eval_label_key": "label_key",
    "eval_tool_key": "tool_key",
    "eval_reward_key": "reward_key",
}


def resolve_evaluation(args: Args) -> None:
    """Sets the `eval_…` options that were left open, and `eval_datasets`: a list of `EvalDatasetConfig`.

    `eval_prompt_data` becomes (name, path) pairs. Where evaluation is all that the run does, nothing of a checkpoint
    but its weights is taken.

    Raises:
        ConfigError: names and paths do not pair up, a name comes twice, or the file of `--eval-config` is wrong.
    """
    for name, source in _FALLBACKS.items():
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, source))
    args.eval_prompt_data = _pairs(args.eval_prompt_data or [])
    sets = [_dataset(args, name, path, {}, "--eval-prompt-data") for name, path in args.eval_prompt_data]
    if args.eval_config is not None:
        sets += _read_sets(args, args.eval_config)
    _check_names([one.name for one in sets])
    args.eval_datasets = sets
    if evaluates_only(args):
        args.finetune, args.rollout_global_dataset = True, False


def read_for_sets(args: Args) -> list[str]:
    """Options whose values are now in the sets."""
    dests = [_option(key).dest for key in SETTINGS]
    return [dest for dest in dests if "eval" in dest] if args.eval_datasets else []


def evaluates(args: Args) -> bool:
    """Whether the run evaluates at all: it has sets, or a function that brings its own."""
    return not args.debug_train_only and bool(args.eval_datasets or args.eval_function_path)


def evaluates_only(args: Args) -> bool:
    """Whether the run evaluates its weights once, and trains nothing (`--num-rollout 0`)."""
    return args.num_rollout == 0 and args.load_debug_rollout_data is None and evaluates(args)


def has_trainer(args: Args) -> bool:
    """Whether there are trainer ranks. To evaluate a Hugging Face directory the engines are enough."""
    if args.debug_rollout_only:
        return False
    return not evaluates_only(args) or bool(args.init_checkpoint and is_torch_dist(args.init_checkpoint))


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    if len(words) == 1:
        file = parse_prompt_file(words[0], "--eval-prompt-data")
        return [(os.path.splitext(os.path.basename(os.path.normpath(file.path)))[0], words[0])]
    if len(words) % 2:
        raise ConfigError(
            f"--eval-prompt-data takes pairs of name and file, but got {len(words)} words: {' '.join(words)}"
        )
    pairs = list(zip(words[::2], words[1::2], strict=True))
    for name, path in pairs:
        if name.rpartition("@[")[0].endswith(_FILES) or name.endswith(_FILES):
            raise ConfigError(f"--eval-prompt-data {name} {path}: a name goes before each file, and {name} is a file's")
    return pairs


def _check_names(names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"evaluation sets: the name {twice[0]!r} comes twice; each set has its own curve, so its own name"
        )
    for name in names:
        if not name or "/" in name:
            raise ConfigError(
                f"evaluation sets: the name {name!r} is empty or has a / in it; it stands in the names of metrics: "
                "eval/NAME and, for its details, eval/NAME/…"
            )


def _read_sets(args: Args, path: str) -> list[EvalDatasetConfig]:
    """`{eval: {defaults: {…}, datasets: [{name, path, …}]}}`; `eval` may be left out, datasets be a mapping by name."""
    where = f"--eval-config {path}"
    content = read_config(path, "--eval-config")
    if "eval" in content:
        _check_keys(content, ("eval",), where)
        content = _mapping(content["eval"], f"{where}: eval")
    _check_keys(content, ("defaults", "datasets"), where)
    defaults = _settings(_mapping(content.get("defaults") or {}, f"{where}: defaults"), f"{where}: defaults")
    for key in ("name", "path"):
        if key in defaults:
            raise ConfigError(f"{where}: defaults: {key!r} belongs to a set")
    sets = []
    for name, given in _entries(content.get("datasets"), where):
        here = f"{where}: set {name!r}"
        own = _settings(given, here)
        if not own.get("path"):
            raise ConfigError(f"{here} has no path: the file of its prompts")
        inherited = {
            key: value for key, value in defaults.items() if not (key in _REWARD and own.keys() & set(_REWARD))
        }
        overrides = {**inherited.pop("metadata_overrides", {}), **own.pop("metadata_overrides", {})}
        chosen = {**inherited, **own, "metadata_overrides": overrides}
        sets.append(_dataset(args, name, chosen.pop("path"), chosen, where))
    if not sets:
        raise ConfigError(f"{where} has no datasets: give a list of sets, each with name and path")
    return sets


def _entries(datasets: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and settings of each set."""
    if isinstance(datasets, dict):
        pairs = [(str(name), {"path": given} if isinstance(given, str) else given) for name, given in datasets.items()]
        return [(name, _mapping(given or {}, f"{where}: set {name!r}")) for name, given in pairs]
    if not isinstance(datasets, list | None):
        raise ConfigError(f"{where}: datasets must be a list of sets or a mapping by name, not {datasets!r:.100}")
    entries = []
    for number, given in enumerate(datasets or []):
        given = _mapping(given, f"{where}: datasets[{number}]")
        if not given.get("name"):
            raise ConfigError(f"{where}: datasets[{number}] has no name")
        entries.append((str(given["name"]), {key: value for key, value in given.items() if key != "name"}))
    return entries


def _settings(given: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings that are not null, checked as the options of that kind are."""
    given = {_ALIASES.get(key, key): value for key, value in given.items() if value is not None}
    _check_keys(given, (*_OTHER_KEYS, *SETTINGS), where)
    if given.keys() >= set(_REWARD):
        raise ConfigError(f"{where}: rm_type and custom_rm_path are two rewards; give one")
    found = {}
    for key, value in given.items():
        if key == "metadata_overrides":
            found[key] = _mapping(value, f"{where}: {key}")
        elif key in _OTHER_KEYS:
            found[key] = str(value)
        else:
            found[key] = _option(key).convert(value, f"{where}: {key}")
    return found


def _dataset(args: Args, name: str, path: str, chosen: dict[str, Any], source: str) -> EvalDatasetConfig:
    values = {
        key: None if key in _REWARD else getattr(args, _option(key).dest) for key in SETTINGS if key not in chosen
    }
    found = EvalDatasetConfig(name, path, **{**values, **chosen}, source=source)
    least, most = found.min_new_tokens or 0, found.max_response_len
    if least > most:
        raise ConfigError(f"{source}: set {name!r}: at least {least} new tokens, and at most {most}: raise the latter")
    return found


def _option(key: str) -> Option:
    return tables().by_name[SETTINGS[key]]


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a mapping of names to values, not {value!r:.100}")
    return {str(key): item for key, item in value.items()}


def _check_keys(given: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def hook_paths(args: Args, dest: str) -> list[str]:
    """What the sets give in place of the option `dest`, which names a user's function."""
    found = []
    for key, flag in SETTINGS.items():
        if tables().by_name[flag].dest == dest and key.endswith("_path"):
            for one in args.eval_datasets:
                value = getattr(one, key)
                found += value if isinstance(value, list) else [value]
    return [path for path in found if path]


def _alone(args: Args) -> str | None:
    if args.num_rollout == 0 and "num_rollout" in args.given and not evaluates(args):
        return (
            "--num-rollout 0 evaluates and trains nothing, so it needs an evaluation set: --eval-prompt-data NAME FILE"
        )
    return None


def _function(args: Args) -> str | None:
    if args.skip_eval_before_train and evaluates_only(args):
        return "--skip-eval-before-train leaves nothing to do with --num-rollout 0, which evaluates once"
    return None


def _files(args: Args) -> str | None:
    for one in args.eval_datasets:
        option = one.source if one.source.startswith("--eval-prompt-data") else f"{one.source}: set {one.name!r}:"
        problem = unreadable(parse_prompt_file(one.path, option), option)
        if problem:
            return problem
    return None


RULES: tuple[Rule, ...] = (_alone, _function)
RUN_RULES: tuple[Rule, ...] = (_files,)


def warnings(args: Args) -> list[str]:
    """Options without an effect."""
    if args.eval_interval is not None and not args.eval_datasets and not args.eval_function_path:
        return [f"--eval-interval {args.eval_interval} has no effect without --eval-prompt-data"]
    return []
