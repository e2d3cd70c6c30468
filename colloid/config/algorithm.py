"""Rules and warnings about the options of estimators and losses. Like those of `checks.py`, they change nothing."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from colloid.algorithms.estimators import Baseline, Credit, get_estimator
from colloid.config.args import Args
from colloid.config.served_models import TEACHER, has_teacher_engine, listed_teacher


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


def _unbiased_kl(args: Args) -> str | None:
    if args.use_unbiased_kl and not args.use_kl_loss:
        return "--use-unbiased-kl changes the KL loss, and there is none: add --use-kl-loss"
    return None


def _tis(args: Args) -> str | None:
    low, high = args.tis_clip_low, args.tis_clip
    if args.use_tis and low > high:
        return f"--tis-clip-low {low} is greater than --tis-clip {high}"
    if args.use_tis and args.use_rollout_logprobs:
        return (
            "--use-tis corrects from the engine's log-probs to the trainer's, and with --use-rollout-logprobs the loss "
            "does without the latter: leave one out"
        )
    low, high = args.rs_lower_bound, args.rs_upper_bound
    if low is not None and high is not None and low > high:
        return f"--rs-lower-bound {low} is greater than --rs-upper-bound {high}"
    return None


def _freezing(args: Args) -> str | None:
    patterns = [*(args.only_train_params_name_list or []), *(args.freeze_params_name_list or [])]
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            return f"{pattern!r} in the names of parameters is no regular expression: {error}"
    if args.only_train_params_name_list and args.freeze_params_name_list:
        return "--only-train-params-name-list and --freeze-params-name-list exclude each other"
    return None


def _distillation(args: Args) -> str | None:
    if not args.use_opd:
        return None
    if args.opd_type is None:
        return "--use-opd needs --opd-type: megatron, the teacher runs in the trainer, or sglang, behind an engine"
    if args.opd_type == "megatron":
        if args.opd_teacher_load is None:
            return "--opd-type megatron needs --opd-teacher-load DIR: the teacher, a model of the same shape"
        return None
    if args.opd_teacher_ckpt_step is not None:
        return "--opd-teacher-ckpt-step is for --opd-type megatron: an engine loads a Hugging Face directory"
    if args.rm_url and args.opd_teacher_load:
        return "--rm-url and --opd-teacher-load are two teachers: leave one out"
    listed = listed_teacher(args) is not None
    if listed and (args.rm_url or args.opd_teacher_load):
        other = "--rm-url" if args.rm_url else "--opd-teacher-load"
        return (
            f"{other} and the model {TEACHER!r} of --sglang-config {args.sglang_config} are two teachers: leave one out"
        )
    if not listed and args.rm_url is None and args.opd_teacher_load is None:
        return (
            "--opd-type sglang needs a teacher: the address of its server with --rm-url URL, or its Hugging Face "
            "directory with --opd-teacher-load DIR, on which the run starts an engine, or a frozen model of the name "
            f"{TEACHER!r} in --sglang-config"
        )
    if args.opd_teacher_load and args.rollout_engine == "sglang":
        return "--opd-teacher-load is for the embedded engine; start the teacher's server, and give --rm-url URL"
    return None


def _server_address(args: Args) -> str | None:
    if args.rm_url is None:
        return None
    parts = urlsplit(args.rm_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"--rm-url {args.rm_url} must be an address like http://127.0.0.1:30000"
    if has_teacher_engine(args) and args.rm_type in ("remote_rm", "boxed_remote_rm"):
        return (
            f"--rm-url {args.rm_url} is the teacher's server with --opd-type sglang, and cannot be that of --rm-type "
            f"{args.rm_type} too: reward with --custom-rm-path, or give the teacher with --opd-teacher-load"
        )
    return None


RULES = (_clip, _sapo, _unbiased_kl, _tis, _freezing, _distillation, _server_address)


def policy_loss(args: Args) -> str:
    """The policy loss that the options mean."""
    return args.policy_loss or get_estimator(args.advantage_estimator).policy_loss


def warnings(args: Args) -> list[str]:
    """What is allowed, but probably not meant."""
    if args.loss_type == "sft_loss":
        return []
    name, loss = args.advantage_estimator, policy_loss(args)
    estimator = get_estimator(name)
    found = []
    if "kl_loss_coef" in args.given and args.kl_loss_coef and not args.use_kl_loss:
        found.append(f"--kl-loss-coef {args.kl_loss_coef} has no effect without --use-kl-loss")
    if args.use_kl_loss and not args.kl_loss_coef:
        found.append("--use-kl-loss only logs the KL: --kl-loss-coef is 0")
    if args.use_kl_loss and args.kl_loss_type == "k1":
        found.append("--kl-loss-type k1 holds nothing: its gradient is zero in expectation on-policy; low_var_kl does")
    if args.kl_coef and not estimator.kl_in_rewards and not args.custom_advantage_function_path:
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
    of_teacher = {"opd_type", "opd_kl_coef", "opd_teacher_load", "opd_teacher_ckpt_step"}
    if not args.use_opd and args.given & of_teacher:
        found.append("the --opd-* options have no effect without --use-opd")
    if args.use_opd and not args.opd_kl_coef:
        found.append("--use-opd only logs the KL to the teacher: --opd-kl-coef is 0")
    if (
        args.n_samples_per_prompt == 1
        and not args.use_opd
        and estimator.baseline is not Baseline.NONE
        and args.rewards_normalization
    ):
        found.append("--n-samples-per-prompt 1: a group of one has advantage 0, so nothing is learned")
    return found + _correction_warnings(args)


def _correction_warnings(args: Args) -> list[str]:
    found = []
    of_tis = {"tis_clip", "tis_clip_low", "tis_level", "tis_mode"}
    if not args.use_tis and args.given & (of_tis | {"custom_tis_function_path"}):
        found.append("the --tis-* options and --custom-tis-function-path have no effect without --use-tis")
    if args.use_tis and args.custom_tis_function_path and args.given & of_tis:
        found.append("--custom-tis-function-path takes the place of the built-in correction: it has to read --tis-*")
    if args.use_tis and args.tis_mode == "truncate" and args.tis_clip_low:
        found.append(f"--tis-clip-low {args.tis_clip_low} has no effect: --tis-mode truncate has no lower bound")
    if "rs_level" in args.given and args.rs_lower_bound is None and args.rs_upper_bound is None:
        found.append(f"--rs-level {args.rs_level} has no effect without --rs-lower-bound or --rs-upper-bound")
    reads_reference = args.use_kl_loss or args.kl_coef
    if args.ref_update_interval and not reads_reference:
        found.append(f"--ref-update-interval {args.ref_update_interval} has no effect: nothing reads the reference")
    if "opsm_delta" in args.given and not args.use_opsm:
        found.append(f"--opsm-delta {args.opsm_delta} has no effect without --use-opsm")
    if args.use_opsm and args.num_steps_per_rollout == 1 and not args.use_rollout_logprobs:
        found.append("--use-opsm has no effect with one step a rollout: the policy is then the behaviour policy")
    return found
