"""Rules about a loss of one's own, old log-probs, Adam without moments, and data that the trainer saves."""

from __future__ import annotations

from collections.abc import Callable

from colloid.config import debug, layout, roles
from colloid.config.args import Args
from colloid.config.tables import tables

Rule = Callable[[Args], "str | None"]

_OF_POLICY_LOSS = (
    "policy_loss",
    "use_tis",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
    "use_opsm",
    "get_mismatch_metrics",
    "custom_pg_loss_reducer_function_path",
)
"""What the built-in policy loss alone has."""


def _custom_loss(args: Args) -> str | None:
    if args.loss_type != "custom_loss":
        return None
    if args.custom_loss_function_path is None:
        return "--loss-type custom_loss needs --custom-loss-function-path: the function that computes it"
    found = _given(args, _OF_POLICY_LOSS)
    if found:
        return f"--loss-type custom_loss takes the place of the policy loss and of its corrections; leave out {found}"
    return None


def _without_advantages(args: Args) -> str | None:
    if args.compute_advantages_and_returns or args.loss_type == "sft_loss":
        return None
    flag = "--disable-compute-advantages-and-returns"
    if args.loss_type == "policy_loss":
        return f"{flag}: the policy loss is made of advantages; it goes with --loss-type custom_loss or sft_loss"
    found = _given(
        args,
        ("custom_advantage_function_path", "normalize_advantages", "use_opd", "keep_old_actor", "use_rollout_entropy"),
    )
    if found:
        return f"{flag} computes neither log-probs nor advantages; leave out {found}"
    if roles.has_critic(args):
        return f"{flag}: --advantage-estimator {args.advantage_estimator} has a critic, which learns from the returns"
    return None


def _old_actor(args: Args) -> str | None:
    if not args.keep_old_actor:
        return None
    if args.loss_type == "sft_loss":
        return "--keep-old-actor is for old log-probs, and --loss-type sft_loss has none: leave it out"
    if args.use_rollout_logprobs:
        return (
            "--keep-old-actor and --use-rollout-logprobs exclude each other: the old log-probs are those of the "
            "weights that the engines have, or the ones that the engines return"
        )
    return None


def _stateless_adam(args: Args) -> str | None:
    if not args.use_stateless_adam:
        return None
    if args.optimizer != "adam":
        return f"--use-stateless-adam needs --optimizer adam, and it is {args.optimizer}"
    found = _given(args, ("use_precision_aware_optimizer", "optimizer_cpu_offload"))
    if found:
        return f"--use-stateless-adam has no states that {found} could change: leave one out"
    return None


def _train_data(args: Args) -> str | None:
    path = args.save_debug_train_data
    if path is None:
        return None
    try:
        names = {path.format(rollout_id=rollout, rank=rank) for rollout in (0, 1) for rank in (0, 1)}
    except (KeyError, IndexError, ValueError) as error:
        return f"--save-debug-train-data {path}: only {debug.FIELD} and {{rank}} may stand in braces ({error})"
    if path.format(rollout_id=0, rank=0) == path.format(rollout_id=1, rank=0):
        return f"--save-debug-train-data {path} needs {debug.FIELD} in it: each rollout would overwrite the one before"
    ranks = layout.model_parallel_size(args) * layout.data_parallel_size(args)
    if ranks > 1 and len(names) < 4:
        return f"--save-debug-train-data {path} needs {{rank}} in it: {ranks} ranks would write the same file"
    return None


def _given(args: Args, dests: tuple[str, ...]) -> str:
    return ", ".join(tables().by_dest[dest][0].flag for dest in dests if dest in args.given and getattr(args, dest))


RULES: tuple[Rule, ...] = (_custom_loss, _without_advantages, _old_actor, _stateless_adam, _train_data)


def warnings(args: Args) -> list[str]:
    """What is allowed, but probably not meant."""
    found = []
    if args.custom_loss_function_path and args.loss_type != "custom_loss":
        found.append("--custom-loss-function-path has no effect without --loss-type custom_loss")
    if args.custom_pg_loss_reducer_function_path and args.loss_type == "sft_loss":
        found.append("--custom-pg-loss-reducer-function-path has no effect: --loss-type sft_loss has no policy loss")
    if args.use_stateless_adam and args.reset_optimizer_states:
        found.append("--reset-optimizer-states has no effect: --use-stateless-adam has none")
    if args.use_stateless_adam and args.given & {"adam_beta1", "adam_beta2"}:
        found.append("--adam-beta1 and --adam-beta2 have no effect with --use-stateless-adam")
    if args.keep_old_actor and args.debug_train_only:
        found.append(
            "--keep-old-actor: without engines no weights are updated, so the old actor stays that of the start"
        )
    if args.save_debug_train_data and args.debug_rollout_only:
        found.append("--save-debug-train-data has no effect: with --debug-rollout-only nothing is trained")
    return found
