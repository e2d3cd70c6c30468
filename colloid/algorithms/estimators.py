"""The advantage estimators as a table of facts: a new one is a new entry here.

Plain data, without torch, so that option parsing can read it. `rewards.py` and `advantages.py` act on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Baseline(Enum):
    """What is subtracted from a sample's reward before training."""

    NONE = "none"
    """Nothing: the raw reward is used."""
    GROUP_MEAN = "group_mean"
    """The mean of the sample's group."""
    LEAVE_ONE_OUT = "leave_one_out"
    """The mean of the other samples of its group."""


class Credit(Enum):
    """How a sample's reward reaches its tokens."""

    BROADCAST = "broadcast"
    """Every token gets the sample's reward."""
    RETURNS = "returns"
    """The reward is at the last token, and each token gets its discounted return."""
    GAE = "gae"
    """The reward is at the last token; generalised advantage estimation with a critic's values."""


@dataclass(frozen=True)
class Estimator:
    """One way from rewards to advantages."""

    baseline: Baseline
    divides_by_std: bool
    """By the group's standard deviation, unless that is switched off."""
    credit: Credit
    kl_in_rewards: bool
    """`kl_coef` times (old - ref) is subtracted from every token's reward."""
    always_whitens: bool
    """Advantages are whitened over the step's global batch also without `--normalize-advantages`."""
    policy_loss: str
    """The entry of `losses.POLICY_LOSSES` that it implies."""


def _group(
    baseline: Baseline = Baseline.GROUP_MEAN, *, divides_by_std: bool = False, policy_loss: str = "ppo"
) -> Estimator:
    return Estimator(baseline, divides_by_std, Credit.BROADCAST, False, False, policy_loss)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": _group(divides_by_std=True),
    "gspo": _group(divides_by_std=True, policy_loss="gspo"),
    "cispo": _group(divides_by_std=True, policy_loss="cispo"),
    "rloo": _group(Baseline.LEAVE_ONE_OUT),
    "reinforce_plus_plus": Estimator(Baseline.NONE, False, Credit.RETURNS, True, True, "ppo"),
    "reinforce_plus_plus_baseline": Estimator(Baseline.GROUP_MEAN, False, Credit.BROADCAST, True, True, "ppo"),
    "ppo": Estimator(Baseline.NONE, False, Credit.GAE, True, False, "ppo"),
}


def get_estimator(name: str) -> Estimator:
    """The entry of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}: it is one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]
