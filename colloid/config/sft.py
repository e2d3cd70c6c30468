"""Supervised fine-tuning: what `--loss-type sft_loss` means for the other options, and whether a run has engines."""

from __future__ import annotations

from collections.abc import Callable

from colloid.config.args import Args
from colloid.config.eval_config import evaluates
from colloid.config.tables import tables

Rule = Callable[[Args], "str | None"]

ROLLOUT_FUNCTION = "colloid.rollout.sft.generate_rollout"
"""Hands out conversations as they are."""

_OF_POLICY = (
    "advantage_estimator",
    "policy_loss",
    "use_kl_loss",
    "kl_coef",
    "entropy_coef",
    "normalize_advantages",
    "custom_advantage_function_path",
    "ref_update_interval",
    "use_rollout_logprobs",
    "use_tis",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
    "use_opsm",
    "get_mismatch_metrics",
    "use_opd",
    "use_rollout_entropy",
    "dynamic_sampling_filter_path",
    "partial_rollout",
)


def resolve_sft(args: Args) -> None:
    """Chooses the rollout function."""
    if args.rollout_function_path == ROLLOUT_FUNCTION.rpartition(".")[0]:
        args.rollout_function_path = ROLLOUT_FUNCTION
    if args.loss_type == "sft_loss" and "rollout_function_path" not in args.given:
        args.rollout_function_path = ROLLOUT_FUNCTION


def takes_conversations(args: Args) -> bool:
    """Whether the rows of the training data are trained as they are, and nothing is generated."""
    return args.rollout_function_path == ROLLOUT_FUNCTION


def serves(args: Args) -> bool:
    """Whether the run has engines: something is generated, or evaluated."""
    if args.debug_train_only:
        return False
    return not takes_conversations(args) or evaluates(args)


def _together(args: Args) -> str | None:
    if takes_conversations(args) and args.loss_type != "sft_loss":
        return (
            f"--rollout-function-path {ROLLOUT_FUNCTION} samples nothing, so there is no reward to train on: it needs "
            "--loss-type sft_loss"
        )
    if args.loss_type != "sft_loss":
        return None
    found = [tables().by_dest[dest][0].flag for dest in _OF_POLICY if dest in args.given and getattr(args, dest)]
    if found:
        return f"--loss-type sft_loss has no rewards and no behaviour policy; leave out {', '.join(found)}"
    if args.debug_rollout_only:
        return "--debug-rollout-only leaves out the trainer, and --loss-type sft_loss has nothing else to run"
    return None


def _samples(args: Args) -> str | None:
    if takes_conversations(args) and args.n_samples_per_prompt != 1:
        return (
            f"--n-samples-per-prompt {args.n_samples_per_prompt}: in SFT a conversation is one sample; leave it out, "
            "and give --rollout-batch-size"
        )
    return None


RULES: tuple[Rule, ...] = (_together, _samples)
