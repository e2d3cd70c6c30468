"""What the options say about advantages and loss, as the records that the algorithms take."""

from __future__ import annotations

from typing import Any

from colloid.algorithms.estimators import get_estimator
from colloid.algorithms.objective import ObjectiveConfig
from colloid.training.advantages import AdvantageConfig


def objective_config(args: Any) -> ObjectiveConfig:
    """The loss that the options describe."""
    return ObjectiveConfig(
        policy_loss=args.policy_loss or get_estimator(args.advantage_estimator).policy_loss,
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
    )


def advantage_config(args: Any) -> AdvantageConfig:
    """The advantages that the options describe."""
    return AdvantageConfig(
        estimator=args.advantage_estimator,
        gamma=args.gamma,
        lambd=args.lambd,
        kl_coef=args.kl_coef,
        normalize=bool(args.normalize_advantages),
    )
