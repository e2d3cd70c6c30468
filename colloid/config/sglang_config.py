"""`--sglang-config`: the models behind engines, and the groups of engines that serve each.

    sglang:
      - name: actor                       # the policy: gets the trainer's weights
        server_groups:
          - {worker_type: regular, num_gpus: 8, num_gpus_per_engine: 4, overrides: {mem_fraction_static: 0.85}}
      - name: judge                       # frozen: keeps its weights
        model_path: /models/judge
        update_weights: false
        server_groups:
          - {worker_type: regular, num_gpus: 4}

Without a file there is one model, the policy, with one group of equal engines. Exactly one model is the policy: the one
that `update_weights` says, else the one that serves `--hf-checkpoint`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from colloid.config.args import Args
from colloid.config.files import read_config
from colloid.config.option import Option
from colloid.config.served_models import DECODE, PLACEHOLDER, PREFILL, WORKER_TYPES, ServedModel, ServerGroup
from colloid.config.sglang import SET_BY_COLLOID, rows_by_name
from colloid.errors import ConfigError
from colloid.models import hf

_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
_SIZE, _BOOL = Option("--n", "int", None, low=1), Option("--b", "bool", None)
_TYPE = Option("--t", "str", None, choices=WORKER_TYPES)
_OF_GROUP = {
    "tp_size": "an engine has the group's num_gpus_per_engine devices",
    "disaggregation_mode": "it follows from the group's worker_type",
}


def resolve_servers(args: Args) -> None:
    """Sets `sglang_models`, and `rollout_num_gpus` where it was left open and the file says it.

    Raises:
        ConfigError: the file is wrong; with what is allowed, or the equation and its numbers.
    """
    if args.sglang_config is None:
        return
    where = f"--sglang-config {args.sglang_config}"
    args.sglang_models = _read(args, where)
    total = sum(model.num_gpus for model in args.sglang_models)
    if args.rollout_num_gpus is None:
        args.rollout_num_gpus = total
    elif args.rollout_num_gpus != total:
        parts = " + ".join(
            f"{group.num_gpus} ({model.name}, {group.worker_type})"
            for model in args.sglang_models
            for group in model.groups
        )
        raise ConfigError(
            f"{where}: num_gpus of all groups must sum up to --rollout-num-gpus {args.rollout_num_gpus}, but {parts} = "
            f"{total}. Change a group, or give --rollout-num-gpus {total}; a group of worker_type placeholder takes "
            "slots that are to stay empty"
        )


def choose_policy(args: Args) -> None:
    """Decides which model is the policy; the others are frozen. `hf_checkpoint` is known.

    Raises:
        ConfigError: none is, or several are, or it would serve another model than is trained.
    """
    if args.sglang_config is None:
        return
    where, models = f"--sglang-config {args.sglang_config}", []
    for model in args.sglang_models:
        same = model.model_path is None or _directory(model.model_path) == _directory(args.hf_checkpoint)
        if model.update_weights is None:
            if not same:
                args.warnings.append(
                    f"{where}: model {model.name!r} keeps its weights: its model_path {model.model_path} is not "
                    "--hf-checkpoint (update_weights: false says so too)"
                )
            model = replace(model, update_weights=same)
        elif model.update_weights and not same:
            raise ConfigError(
                f"{where}: model {model.name!r} has update_weights: true and model_path {model.model_path}, but the "
                f"trainer's weights are of the model --hf-checkpoint {args.hf_checkpoint}. Leave model_path out, or "
                "set update_weights: false"
            )
        models.append(replace(model, model_path=None if same else model.model_path))
    updated = [model.name for model in models if model.update_weights]
    if len(updated) > 1:
        raise ConfigError(
            f"{where}: models {', '.join(map(repr, updated))} would all get the trainer's weights, and one model is "
            "trained: set update_weights: false for those that are frozen, or make them server_groups of one model"
        )
    if not updated:
        raise ConfigError(
            f"{where}: no model is the policy: one needs update_weights: true, or --hf-checkpoint {args.hf_checkpoint} "
            "as its model_path (or none)"
        )
    if not next(model for model in models if model.update_weights).num_engines:
        raise ConfigError(f"{where}: the policy {updated[0]!r} has no engine: all its server_groups are placeholders")
    args.sglang_models = tuple(models)


def _read(args: Args, where: str) -> tuple[ServedModel, ...]:
    content = read_config(args.sglang_config, "--sglang-config")
    _check_keys(content, ("sglang",), where)
    entries = content.get("sglang")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: sglang must be a list of models, each with name and server_groups")
    models: list[ServedModel] = []
    for number, given in enumerate(entries):
        model = _model(args, _mapping(given, f"{where}: sglang[{number}]"), f"{where}: sglang[{number}]", where)
        if model.name in {other.name for other in models}:
            raise ConfigError(f"{where}: two models are named {model.name!r}; a name is how a hook asks for a model")
        models.append(model)
    return tuple(models)


def _model(args: Args, given: dict[str, Any], here: str, where: str) -> ServedModel:
    if "engine_groups" in given and "server_groups" not in given:  # as slime called them before
        given = {**given, "server_groups": given["engine_groups"]}
        del given["engine_groups"]
    _check_keys(given, _MODEL_KEYS, here)
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{here} has no name: what hooks call it in get_model_url")
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigError(f"{here}: the name {name!r} is one of a directory too: letters, digits and ._+- are allowed")
    here = f"{where}: model {name!r}"
    entries = given.get("server_groups")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{here}: server_groups must be a list of groups, each with worker_type and num_gpus")
    default = _SIZE.convert(given.get("num_gpus_per_engine"), f"{here}: num_gpus_per_engine")
    default = default or args.rollout_num_gpus_per_engine
    groups, paths = [], []
    for number, entry in enumerate(entries):
        there = f"{here}: server_groups[{number}]"
        group = _group(_mapping(entry, there), default, there)
        paths.append(group.overrides.pop("model_path", None))
        groups.append(group)
    path = given.get("model_path")
    if not isinstance(path, str | None):
        raise ConfigError(f"{here}: model_path must be a directory, not {path!r:.100}")
    effective = {other or path for other in paths}
    if len(effective) > 1:
        raise ConfigError(
            f"{here}: its server_groups have different models, {', '.join(map(str, sorted(map(str, effective))))}: "
            "name each model apart"
        )
    _check_pairs(groups, here)
    update = _BOOL.convert(given.get("update_weights"), f"{here}: update_weights")
    return ServedModel(name, tuple(groups), effective.pop(), update)


def _group(given: dict[str, Any], default: int, here: str) -> ServerGroup:
    _check_keys(given, _GROUP_KEYS, here)
    for key in ("worker_type", "num_gpus"):
        if given.get(key) is None:
            raise ConfigError(f"{here} has no {key}" + (f": {', '.join(WORKER_TYPES)}" if key == "worker_type" else ""))
    kind = _TYPE.convert(given["worker_type"], f"{here}: worker_type")
    num_gpus = _SIZE.convert(given["num_gpus"], f"{here}: num_gpus")
    size = _SIZE.convert(given.get("num_gpus_per_engine"), f"{here}: num_gpus_per_engine") or default
    if kind == PLACEHOLDER:
        size = 1
    if num_gpus % size:
        raise ConfigError(f"{here}: num_gpus {num_gpus} is not a multiple of num_gpus_per_engine {size}")
    overrides = _overrides(_mapping(given.get("overrides") or {}, f"{here}: overrides"), f"{here}: overrides")
    if kind == PLACEHOLDER and overrides:
        raise ConfigError(f"{here}: a placeholder starts no engine that could have overrides")
    return ServerGroup(kind, num_gpus, size, overrides)


def _overrides(given: dict[str, Any], here: str) -> dict[str, Any]:
    """By SGLang's name, converted as the option is; `model_path` is left for the model."""
    rows = rows_by_name()
    found = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if value is None:
            continue
        if name == "model_path":
            found[name] = str(value)
            continue
        row = rows.get(name)
        if row is None:
            close = difflib.get_close_matches(name, rows, 1)
            raise ConfigError(
                f"{here}: SGLang has no option {key!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
        name = row.dest.removeprefix("sglang_")
        reason = _OF_GROUP.get(name) or SET_BY_COLLOID.get(row.dest)
        if reason:
            raise ConfigError(f"{here}: {key} cannot be given: {reason}")
        found[name] = row.convert(value, f"{here}: {key}")
    return found


def _check_pairs(groups: list[ServerGroup], here: str) -> None:
    kinds = {group.worker_type for group in groups} - {PLACEHOLDER}
    if kinds & {PREFILL, DECODE} and kinds != {PREFILL, DECODE}:
        missing = sorted({PREFILL, DECODE} - kinds)
        what = f"there is none of {missing[0]}" if missing else "regular ones cannot be beside them"
        raise ConfigError(f"{here}: prefill and decode groups work in pairs, and {what}")


def _check_keys(given: Iterable[str], known: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a mapping of names to values, not {value!r:.100}")
    return {str(key): item for key, item in value.items()}


def _directory(name: str | None) -> str | None:
    """Where a model lies, so that a link and the name of a hub's repository are the same as the directory."""
    if name is None:
        return None
    return os.path.realpath(hf.find_model(name) or name)
