"""The models behind engines, each with a router of its own: the policy, and frozen ones. What is allowed of them.

Plain data; `sglang_config` reads it from a file. Without one there is the policy alone, with equal engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from colloid.config.args import Args
from colloid.config.sglang import EMBEDDED_USES
from colloid.models import families, hf

Rule = Callable[[Args], "str | None"]

DEFAULT_NAME = "default"
"""Of the policy where no file names it; there is no need to know another one."""
ALIASES = (DEFAULT_NAME, "actor", "policy")
"""Names that mean the policy, unless a model of the file has them."""
TEACHER = "teacher"
"""Of the model that `--opd-type sglang` asks, unless it is a server of the user's (`--rm-url`)."""
REGULAR, PREFILL, DECODE, PLACEHOLDER = "regular", "prefill", "decode", "placeholder"
WORKER_TYPES = (REGULAR, PREFILL, DECODE, PLACEHOLDER)


@dataclass(frozen=True)
class ServerGroup:
    """Engines that are alike."""

    worker_type: str
    num_gpus: int
    """Device slots of all its engines; those of a placeholder stay empty."""
    num_gpus_per_engine: int
    overrides: dict[str, Any] = field(default_factory=dict)
    """SGLang's options by name (`mem_fraction_static`); they go before `--sglang-*`."""

    @property
    def num_engines(self) -> int:
        return 0 if self.worker_type == PLACEHOLDER else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class ServedModel:
    """A model with a router of its own."""

    name: str
    groups: tuple[ServerGroup, ...]
    model_path: str | None = None
    """A directory; None: that of the policy's start."""
    update_weights: bool | None = True
    """Whether it gets the trainer's weights. None: not decided yet (`choose_policy`)."""

    @property
    def num_gpus(self) -> int:
        return sum(group.num_gpus for group in self.groups)

    @property
    def num_engines(self) -> int:
        return sum(group.num_engines for group in self.groups)

    @property
    def disaggregated(self) -> bool:
        """Whether other engines read the prompts than write the responses."""
        return any(group.worker_type in (PREFILL, DECODE) for group in self.groups)


def policy_model(args: Args) -> ServedModel:
    """The one that the trainer's weights go to."""
    return next(model for model in args.sglang_models if model.update_weights)


def has_teacher_engine(args: Args) -> bool:
    """Whether a teacher behind an engine judges what is sampled."""
    return bool(args.use_opd) and args.opd_type == "sglang"


def listed_teacher(args: Args) -> ServedModel | None:
    """The frozen model of that name in `--sglang-config`."""
    return next((model for model in args.sglang_models if model.name == TEACHER and not model.update_weights), None)


def added_teacher(args: Args) -> ServedModel | None:
    """That of `--opd-teacher-load`: one engine, on slots beside `--rollout-num-gpus`."""
    if not has_teacher_engine(args) or args.rm_url or listed_teacher(args) is not None:
        return None
    group = ServerGroup(REGULAR, args.rollout_num_gpus_per_engine, args.rollout_num_gpus_per_engine)
    return ServedModel(TEACHER, (group,), args.opd_teacher_load, update_weights=False)


def served_models(args: Args) -> tuple[ServedModel, ...]:
    """All that the run serves; the policy is among them."""
    added = added_teacher(args)
    return args.sglang_models if added is None else (*args.sglang_models, added)


def engine_context_length(args: Args) -> int | None:
    """Tokens of prompt and response that every engine of the policy has room for, as far as options say it."""
    found = [group.overrides.get("context_length") for group in policy_model(args).groups if group.num_engines]
    return min(
        (value or args.sglang_context_length for value in found if value or args.sglang_context_length), default=None
    )


def one_model(args: Args) -> tuple[ServedModel, ...]:
    """What there is without a file."""
    group = ServerGroup(REGULAR, args.rollout_num_gpus, args.rollout_num_gpus_per_engine)
    return (ServedModel(DEFAULT_NAME, (group,)),)


def _disaggregation(args: Args) -> str | None:
    split = [model.name for model in args.sglang_models if model.disaggregated]
    if not split:
        return None
    what = f"--sglang-config {args.sglang_config}: model {split[0]!r} has prefill and decode groups"
    if args.rollout_engine != "sglang":
        return f"{what}, which need SGLang: give --rollout-engine sglang (it is {args.rollout_engine})"
    if args.use_rollout_routing_replay and policy_model(args).disaggregated:
        return (
            f"{what}, and --use-rollout-routing-replay asks engines directly for the experts of a response, not "
            "through the router that pairs them: make its groups regular"
        )
    return None


def _router_policies(args: Args) -> str | None:
    given = sorted(args.given & {"router_prefill_policy", "router_decode_policy"})
    if given and not any(model.disaggregated for model in args.sglang_models):
        flag = f"--{given[0].replace('_', '-')}"
        return f"{flag}: there are no prefill and decode groups (worker_type in --sglang-config) to route to"
    return None


def _external(args: Args) -> str | None:
    if args.sglang_config is not None and args.rollout_external_engine_addrs:
        return (
            "--sglang-config starts engines, and --rollout-external-engine-addrs names engines that run already: give "
            "one of them"
        )
    return None


def _disaggregation_on_cpu(args: Args) -> str | None:
    split = [model.name for model in args.sglang_models if model.disaggregated]
    if split and args.device == "cpu":
        return (
            f"--sglang-config {args.sglang_config}: model {split[0]!r} has prefill and decode groups, and SGLang hands "
            "a prompt's KV cache on with CUDA's pinned memory and events: on a CPU make its groups regular"
        )
    return None


def _frozen_paths(args: Args) -> str | None:
    for model in args.sglang_models:
        if model.model_path is None:
            continue
        what = f"--sglang-config {args.sglang_config}: model {model.name!r}: model_path {model.model_path}"
        directory = hf.find_model(model.model_path)
        if directory is None or not os.path.isfile(os.path.join(directory, "config.json")):
            return f"{what}: no such directory with a Hugging Face model (config.json)"
        reasons = families.unsupported(hf.read_hf_config(directory)) if args.rollout_engine == "embedded" else []
        if reasons:
            return f"{what}: the embedded engine does not serve it: {', '.join(reasons)}"
    return None


RULES: tuple[Rule, ...] = (_disaggregation, _router_policies, _external)
RUN_RULES: tuple[Rule, ...] = (_disaggregation_on_cpu, _frozen_paths)


def warnings(args: Args) -> list[str]:
    """What is allowed, but probably not meant."""
    if args.rollout_engine != "embedded":
        return []
    unused = {
        name
        for model in args.sglang_models
        for group in model.groups
        for name in group.overrides
        if name not in EMBEDDED_USES
    }
    found = f"--sglang-config {args.sglang_config}: the embedded engine has no use for {', '.join(sorted(unused))}"
    return [found] if unused else []
