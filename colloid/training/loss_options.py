"""What the options say about advantages and loss, as the records that the algorithms take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colloid.algorithms.corrections import CorrectionConfig
from colloid.algorithms.objective import ObjectiveConfig
from colloid.config.algorithm import policy_loss
from colloid.hooks import bind, load_hook
from colloid.training.advantages import AdvantageConfig
from colloid.training.step_loss import LossChoice


def objective_config(args: Any) -> ObjectiveConfig:
    """The loss that the options describe."""
    return ObjectiveConfig(
        policy_loss=policy_loss(args),
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip_high,
        eps_clip_c=args.eps_clip_c,
        sapo_tau_pos=args.sapo_tau_pos,
        sapo_tau_neg=args.sapo_tau_neg,
        use_kl_loss=bool(args.use_kl_loss),
        kl_loss_coef=args.kl_loss_coef,
        kl_loss_type=args.kl_loss_type,
        use_unbiased_kl=bool(args.use_unbiased_kl),
        entropy_coef=args.entropy_coef,
        use_rollout_logprobs=bool(args.use_rollout_logprobs),
        correction=correction_config(args),
    )


def loss_choice(args: Any) -> LossChoice:
    """Which loss is trained, with the user's functions for it.

    Raises:
        HookError: one of them cannot be loaded.
    """
    policy = args.loss_type == "policy_loss"
    return LossChoice(
        kind=args.loss_type,
        objective=objective_config(args),
        per_token=bool(args.calculate_per_token_loss),
        custom_loss=_hook(args, "custom_loss") if args.loss_type == "custom_loss" else None,
        custom_tis=custom_tis(args) if policy else None,
        reducer=_hook(args, "custom_pg_loss_reducer", "pg_loss_reducer") if policy else None,
    )


def correction_config(args: Any) -> CorrectionConfig:
    """The built-in corrections that the options describe; a function of the user's takes the place of TIS."""
    return CorrectionConfig(
        use_tis=bool(args.use_tis) and not args.custom_tis_function_path,
        tis_clip=args.tis_clip,
        tis_clip_low=args.tis_clip_low,
        tis_level=args.tis_level,
        tis_mode=args.tis_mode,
        rs_level=args.rs_level,
        rs_lower_bound=args.rs_lower_bound,
        rs_upper_bound=args.rs_upper_bound,
        rs_veto_threshold=args.rs_veto_threshold,
        use_opsm=bool(args.use_opsm),
        opsm_delta=args.opsm_delta,
        mismatch_metrics=bool(args.get_mismatch_metrics),
    )


def advantage_config(args: Any) -> AdvantageConfig:
    """The advantages that the options describe."""
    return AdvantageConfig(
        estimator=args.advantage_estimator,
        gamma=args.gamma,
        lambd=args.lambd,
        kl_coef=args.kl_coef,
        distills=bool(args.use_opd),
        distillation_coef=args.opd_kl_coef if args.use_opd else 0.0,
        normalize=bool(args.normalize_advantages),
        custom=_hook(args, "custom_advantage"),
    )


def custom_tis(args: Any) -> Callable[..., Any] | None:
    """The user's correction of the policy loss, with `args` bound.

    Raises:
        HookError: it cannot be loaded.
    """
    return _hook(args, "custom_tis") if args.use_tis else None


def _hook(args: Any, name: str, kind: str | None = None) -> Callable[..., Any] | None:
    path = getattr(args, f"{name}_function_path")
    return bind(load_hook(path, kind or name), args) if path else None
