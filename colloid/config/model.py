"""The model of a run: its directory, its `config.json`, the arguments that follow, and where weights come from."""

from __future__ import annotations

import os
import re
from itertools import groupby
from typing import Any

from colloid.config import moe_mla
from colloid.config.args import Args
from colloid.config.tables import tables
from colloid.errors import ConfigError
from colloid.models import hf
from colloid.models.derive import model_arguments

MARKER = "latest_checkpointed_iteration.txt"
"""The file in a checkpoint directory that names the last good one."""

RELEASE = "release"
"""What the marker names, and the directory, where the weights are of no step of a run: a converted model."""

_DEFAULTS = {
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "norm_epsilon": 1e-5,
    "rope_scaling_factor": 8.0,
    "rotary_scaling_factor": 1.0,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
"""Model arguments where neither the user nor a `config.json` says anything (a plan without the model)."""


def resolve_load(args: Args) -> None:
    """Decides what `--load` is: sets `resume_from`, or makes it the start weights.

    A run goes on from its own checkpoints. With `--finetune`, and where the checkpoint is not a run's (that of the
    converter, or of Megatron itself), the weights are all that is taken.

    Raises:
        ConfigError: it is neither a checkpoint directory, nor a Hugging Face directory, nor empty or missing; or the
            marker names a checkpoint that is not there.
    """
    args.resume_from = None
    load = args.load
    if load is None or not os.path.exists(load):
        if load is not None and args.ckpt_step is not None:
            raise ConfigError(f"--ckpt-step {args.ckpt_step}: {load} does not exist")
        return
    if not os.path.isdir(load):
        raise ConfigError(f"--load {load} is a file; give a directory of checkpoints or a Hugging Face directory")
    marker = os.path.join(load, MARKER)
    if os.path.isfile(marker) or args.ckpt_step is not None:
        _go_on_from(args, _committed(load, marker, args.ckpt_step))
    elif re.fullmatch(r"iter_\d{7,}", os.path.basename(os.path.normpath(load))) or is_torch_dist(load):
        _go_on_from(args, os.path.normpath(load))
    elif os.path.isfile(os.path.join(load, "config.json")):
        args.init_checkpoint = load
    elif any(not name.startswith(".writing_") for name in os.listdir(load)):
        raise ConfigError(
            f"--load {load} holds neither checkpoints ({MARKER}) nor a Hugging Face model (config.json); give another "
            "directory, or an empty or new one to start afresh"
        )


def is_torch_dist(directory: str | os.PathLike[str]) -> bool:
    """Whether files of Megatron's torch_dist format lie in it."""
    return all(os.path.isfile(os.path.join(directory, name)) for name in ("metadata.json", ".metadata"))


def _go_on_from(args: Args, checkpoint: str) -> None:
    if args.finetune or not os.path.isfile(os.path.join(checkpoint, "meta.json")):
        args.init_checkpoint = _torch_dist(checkpoint, "--load")
    else:
        args.resume_from = checkpoint


def _torch_dist(checkpoint: str, option: str) -> str:
    """Where the model's files lie in a committed checkpoint."""
    for directory in (os.path.join(checkpoint, "trainer"), checkpoint):
        if is_torch_dist(directory):
            return directory
    raise ConfigError(
        f"{option} {checkpoint} holds no model in Megatron's torch_dist format (metadata.json and .metadata); convert "
        "it, or give a Hugging Face directory"
    )


def _committed(load: str, marker: str, step: int | None) -> str:
    """The directory of a step, or the one that the marker names (a converter's is called `release`, as Megatron's)."""
    if step is None:
        with open(marker, encoding="utf-8") as file:
            text = file.read().strip()
        if text == RELEASE:
            return os.path.join(load, RELEASE)
        if not text.isdigit():
            raise ConfigError(f"{marker} must hold a number, not {text!r}: choose a checkpoint with --ckpt-step")
        step = int(text)
    directory = os.path.join(load, f"iter_{step:07d}")
    if not os.path.isdir(directory):
        there = ", ".join(sorted(name for name in os.listdir(load) if name.startswith("iter_"))) or "none"
        raise ConfigError(f"there is no checkpoint {directory}; there are: {there}")
    return directory


def resolve_model(args: Args) -> None:
    """Sets `hf_checkpoint`, `hf_config`, `model_type`, `init_checkpoint`, `ref_load` and the model arguments.

    Without a model at hand, `--dry-run` goes on with the model arguments alone.

    Raises:
        ConfigError: the model is missing, or given arguments differ from its `config.json`.
    """
    values = args.as_dict(redact=False)
    init = values.get("init_checkpoint")
    name = values["hf_checkpoint"] or (None if init and is_torch_dist(init) else init)
    directory = hf.find_model(name) if name else None
    if directory is None or not os.path.isfile(os.path.join(directory, "config.json")):
        _without_model(args, name, directory)
        return
    config = hf.read_hf_config(directory)
    args.hf_checkpoint, args.hf_config, args.model_type = directory, config, config.get("model_type")
    args.init_checkpoint = init or directory
    args.ref_load = (
        _reference(values["ref_load"], values["ref_ckpt_step"], "--ref-load")
        if values["ref_load"]
        else args.init_checkpoint
    )
    if values["opd_teacher_load"]:
        args.opd_teacher_load = _reference(
            values["opd_teacher_load"], values["opd_teacher_ckpt_step"], "--opd-teacher-load"
        )
        if values["opd_type"] == "sglang" and is_torch_dist(args.opd_teacher_load):
            raise ConfigError(
                f"--opd-teacher-load {args.opd_teacher_load} is a checkpoint, and an engine (--opd-type sglang) loads "
                "a Hugging Face directory: export it, or take --opd-type megatron"
            )
    derived = model_arguments(config)
    _compare(args, derived, os.path.join(directory, "config.json"), "--hf-checkpoint")
    # A teacher behind an engine may have another shape.
    teacher = args.opd_teacher_load if values["opd_type"] == "megatron" else None
    for option, other in (
        ("--load", args.init_checkpoint),
        ("--ref-load", args.ref_load),
        *([("--opd-teacher-load", teacher)] if teacher else []),
    ):
        if not is_torch_dist(other) and os.path.realpath(other) != os.path.realpath(directory):
            _same_model(derived, model_arguments(hf.read_hf_config(other)), option, other, directory)
    args.derive(derived)
    args.moe_layer_freq = derived.get("moe_layer_freq", args.moe_layer_freq)
    _fill_defaults(args)


def _without_model(args: Args, name: str | None, directory: str | None) -> None:
    if not args.dry_run:
        if not name:
            raise ConfigError("no model: give its Hugging Face directory with --hf-checkpoint DIR")
        if directory is not None:
            raise ConfigError(f"--hf-checkpoint {name} has no config.json: it is not a Hugging Face model directory")
        raise ConfigError(
            f"--hf-checkpoint {name}: there is no such directory, and no such model in the local Hugging Face cache. "
            f"Nothing is downloaded during a run: fetch it first (`hf download {name} --local-dir DIR`) and give DIR"
        )
    args.hf_config, args.model_type = {}, None
    args.init_checkpoint = args.init_checkpoint or name
    args.ref_load = args.ref_load or args.init_checkpoint
    if name and directory is None:
        args.warnings.append(f"the model {name} is not on this machine: planned from the model arguments alone")
    _fill_defaults(args)


def _fill_defaults(args: Args) -> None:
    values = args.as_dict(redact=False)
    heads = values["num_attention_heads"]
    follow = dict(_DEFAULTS)
    if heads:
        follow["num_query_groups"] = heads
        follow["kv_channels"] = (values["hidden_size"] or 0) // heads or None
    for key, value in follow.items():
        if values[key] is None:
            setattr(args, key, value)


def _reference(name: str, step: int | None, option: str) -> str:
    directory = hf.find_model(name)
    if directory is None:
        raise ConfigError(f"{option} {name}: there is no such directory")
    marker = os.path.join(directory, MARKER)
    if os.path.isfile(marker) or step is not None:
        return _torch_dist(_committed(directory, marker, step), option)
    if not os.path.isfile(os.path.join(directory, "config.json")):
        return _torch_dist(directory, option)
    hf.read_hf_config(directory)
    return directory


def switch_off_on_cpu(args: Args) -> None:
    """Switches off what needs CUDA kernels, with one warning that names the flags."""
    found = [dest for dest in moe_mla.NOT_ON_CPU if args.device == "cpu" and getattr(args, dest)]
    for dest in found:
        setattr(args, dest, False)
    if found:
        names = ", ".join(tables().by_dest[dest][0].flag for dest in found)
        args.warnings.append(f"switched off, as the CPU has no such kernels (results are the same): {names}")


def _compare(args: Args, derived: dict[str, Any], path: str, source: str) -> None:
    differences = []
    for dest in sorted(derived.keys() & args.given):
        given = getattr(args, dest)
        if dest == "moe_layer_freq" and isinstance(given, int):
            given = [int(layer % given == 0) for layer in range(derived["num_layers"])]
        if not _equal(given, derived[dest]):
            option = tables().by_dest[dest][0]
            shown = f"{option.flag} {_short(given)}" if option.takes_value else option.flag
            differences.append(f"{shown} but {_describe(dest, derived[dest])}")
    if differences:
        raise ConfigError(
            f"the model arguments do not fit {path} (from {source}): {'; '.join(differences)}. Leave them out, or give "
            "the model that they belong to"
        )


def _describe(dest: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"the model has {dest}={value}"
    return f"the model has {'none' if value is None else _short(value)}"


def _short(value: Any) -> Any:
    """Lists as a user would write them: `[0]*3+[1]*58`."""
    if not isinstance(value, list):
        return value
    runs = [(item, len(list(run))) for item, run in groupby(value)]
    return "+".join(f"[{item}]*{count}" for item, count in runs) or "[]"


def _equal(given: Any, derived: Any) -> bool:
    numbers = (int, float)
    if isinstance(given, numbers) and isinstance(derived, numbers) and not isinstance(given, bool):
        return abs(given - derived) <= 1e-9 * max(abs(given), abs(derived))
    return given == derived


def _same_model(ours: dict, theirs: dict, option: str, other: str, directory: str) -> None:
    different = [
        f"{key} is {_short(theirs.get(key))} and {_short(ours.get(key))}"
        for key in sorted(ours.keys() | theirs.keys())
        if key != "max_position_embeddings" and not _equal(ours.get(key), theirs.get(key))
    ]
    if different:
        raise ConfigError(f"{option} {other} is another model than --hf-checkpoint {directory}: {'; '.join(different)}")
