"""Actor and critic: options that differ between them (`--megatron-config-path`), and what a critic demands of the rest.

The file has a section for each role, whose keys are options of the optimizer and of its schedule:

    critic: {lr: 1e-5, lr_warmup_iters: 10}
"""

from __future__ import annotations

import os
from typing import Any

from colloid.algorithms.estimators import Credit, get_estimator
from colloid.config.args import Args
from colloid.config.files import read_config
from colloid.config.model import is_torch_dist
from colloid.config.tables import tables
from colloid.config.tokens import parse_mapping
from colloid.errors import ConfigError

ROLES = ("actor", "critic")
OVERRIDABLE = frozenset(
    [
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "clip_grad",
        "end_weight_decay",
        "lr",
        "lr_decay_iters",
        "lr_decay_style",
        "lr_warmup_fraction",
        "lr_warmup_init",
        "lr_warmup_iters",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_style",
        "min_lr",
        "optimizer",
        "sgd_momentum",
        "start_weight_decay",
        "weight_decay",
        "weight_decay_incr_style",
    ]
)
"""Options that may differ between the roles: what comes of them depends on nothing else of the run."""


def has_critic(args: Args) -> bool:
    """Whether the estimator needs a critic's values. SFT has no advantages."""
    return args.loss_type != "sft_loss" and get_estimator(args.advantage_estimator).credit is Credit.GAE


def resolve_roles(args: Args) -> None:
    """Sets `role_overrides`: role -> {attribute: value}.

    Raises:
        ConfigError: a role or an option is unknown or may not differ, or a value is wrong.
    """
    args.role_overrides = {role: {} for role in ROLES}
    path = args.megatron_config_path
    if path is None:
        return
    for role, content in read_config(path, "--megatron-config-path").items():
        if role not in ROLES:
            raise ConfigError(f"--megatron-config-path {path}: unknown role {role!r}; the roles are {', '.join(ROLES)}")
        if not isinstance(content, dict):
            raise ConfigError(f"--megatron-config-path {path}: {role} must be a mapping of option names to values")
        values, _ = parse_mapping({str(key): value for key, value in content.items()}, f"{path}: {role}")
        for dest, value in values.items():
            if dest.endswith("parallel_size") or dest == "sequence_parallel":
                raise ConfigError(
                    f"--megatron-config-path {path}: {role}: {tables().by_dest[dest][0].flag} is for all roles: the "
                    "rank of the critic and that of the policy with the same number are given the same part of a "
                    "batch, and hand each other its values and returns. Give it on the command line"
                )
            if dest not in OVERRIDABLE:
                raise ConfigError(
                    f"--megatron-config-path {path}: {role}: {tables().by_dest[dest][0].flag} is for all roles; what "
                    f"may differ: {', '.join(sorted(OVERRIDABLE))}"
                )
            for option in tables().by_dest[dest]:
                if not option.supports(value):
                    why = f"{dest} {value} is not supported: {option.refused}"
                    raise ConfigError(f"--megatron-config-path {path}: {role}: {why}")
        args.role_overrides[role] = {dest: value for dest, value in values.items() if value is not None}


def role_args(args: Args, role: str) -> Args:
    """A copy of the options for the ranks of one role."""
    overrides: dict[str, Any] = args.role_overrides[role]
    values, given = args.as_dict(redact=False) | overrides, args.given | overrides.keys()
    # Two ways to say the same: the role's own stands alone.
    for name, other, off in (("iters", "fraction", None), ("fraction", "iters", 0)):
        if f"lr_warmup_{name}" in overrides and f"lr_warmup_{other}" not in overrides:
            values[f"lr_warmup_{other}"] = off
            given -= {f"lr_warmup_{other}"}
    return Args(values, given=given, derived=args.derived)


def _options(args: Args) -> str | None:
    if has_critic(args) and args.custom_advantage_function_path:
        return (
            "--custom-advantage-function-path is not supported yet with --advantage-estimator ppo: it yields no "
            "returns for the critic to learn"
        )
    return None


def _start(args: Args) -> str | None:
    if not has_critic(args):
        return None
    if args.resume_from:
        if os.path.isdir(os.path.join(args.resume_from, "critic")):
            return None
        return (
            f"--load: {args.resume_from} has no critic: its run was not one of --advantage-estimator ppo. To start "
            "from its policy, make it a Hugging Face directory with tools/convert_torch_dist_to_hf.py"
        )
    if args.init_checkpoint and is_torch_dist(args.init_checkpoint):
        return (
            f"--advantage-estimator ppo starts from a Hugging Face directory: {args.init_checkpoint} is torch_dist. "
            "Convert it with tools/convert_torch_dist_to_hf.py"
        )
    return None


RULES = (_options,)
RUN_RULES = (_start,)


def warnings(args: Args) -> list[str]:
    """What is allowed, but probably not meant."""
    if has_critic(args):
        if args.num_rollout is not None and args.num_critic_only_steps >= args.num_rollout:
            return [
                f"--num-critic-only-steps {args.num_critic_only_steps}: the policy is not trained in any of the "
                f"{args.num_rollout} rollouts"
            ]
        return []
    found = [
        f"--{name.replace('_', '-')} has no effect with --advantage-estimator {args.advantage_estimator}: it is of ppo"
        for name in ("lambd", "num_critic_only_steps", "value_clip")
        if name in args.given
    ]
    if args.role_overrides["critic"]:
        found.append(f"--megatron-config-path {args.megatron_config_path}: there is no critic without ppo")
    return found
