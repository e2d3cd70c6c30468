"""Rules and warnings about the options of estimators and losses. Like those of `checks.py`, they change nothing."""

from __future__ import annotations

from colloid.algorithms.estimators import Baseline, Credit, get_estimator
from colloid.config.args import Args


def _clip(args: Args) -> str | None:
    if args.eps_clip_high is not None and args.eps_clip_high < args.eps_clip and "eps_clip_high" in args.given:
        return f"--eps-clip-high {args.eps_clip_high} is less than --eps-clip {args.eps_clip}"
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        return f"--eps-clip-c {args.eps_clip_c} must be greater than 1"
    return None


def _sapo(args: Args) -> str | None:
    for flag, value in (("--sapo-tau-pos", args.sapo_tau_pos), ("--sapo-tau-neg", args.sapo_tau_neg)):
        if value <= 0:
            return f"{flag} {value} must be greater than 0: the loss is divided by it"
    return None


RULES = (_clip, _sapo)


def policy_loss(args: Args) -> str:
    """The policy loss that the options mean."""
    return args.policy_loss or get_estimator(args.advantage_estimator).policy_loss


def warnings(args: Args) -> list[str]:
    """What is allowed, but probably not meant."""
    name, loss = args.advantage_estimator, policy_loss(args)
    estimator = get_estimator(name)
    found = []
    if "kl_loss_coef" in args.given and args.kl_loss_coef and not args.use_kl_loss:
        found.append(f"--kl-loss-coef {args.kl_loss_coef} has no effect without --use-kl-loss")
    if args.use_kl_loss and not args.kl_loss_coef:
        found.append("--use-kl-loss only logs the KL: --kl-loss-coef is 0")
    if args.use_kl_loss and args.kl_loss_type == "k1":
        found.append("--kl-loss-type k1 holds nothing: its gradient is zero in expectation on-policy; low_var_kl does")
    if args.kl_coef and not estimator.kl_in_rewards:
        found.append(
            f"--kl-coef {args.kl_coef} has no effect with --advantage-estimator {name}: a KL to the reference is then "
            "part of the loss, with --use-kl-loss and --kl-loss-coef"
        )
    if args.gamma != 1 and estimator.credit is Credit.BROADCAST:
        found.append(f"--gamma {args.gamma} has no effect with --advantage-estimator {name}: it discounts nothing")
    if loss != "sapo" and args.given & {"sapo_tau_pos", "sapo_tau_neg"}:
        found.append(f"--sapo-tau-pos and --sapo-tau-neg have no effect: the policy loss is {loss}, not sapo")
    if loss == "sapo" and args.given & {"eps_clip", "eps_clip_high"}:
        found.append("--eps-clip and --eps-clip-high have no effect: sapo does not clip")
    if args.eps_clip_c is not None and loss not in ("ppo", "gspo"):
        found.append(f"--eps-clip-c {args.eps_clip_c} has no effect: the policy loss is {loss}, without a dual clip")
    if not args.grpo_std_normalization and not estimator.divides_by_std:
        found.append(f"--disable-grpo-std-normalization has no effect with --advantage-estimator {name}")
    if args.n_samples_per_prompt == 1 and estimator.baseline is not Baseline.NONE and args.rewards_normalization:
        found.append("--n-samples-per-prompt 1: a group of one has advantage 0, so nothing is learned")
    return found
