"""Which device slot runs what: a plan first, made of plain data, then Ray placement groups for it.

A slot is one GPU, or on a machine without CUDA one process. Trainer ranks take a slot each. Engines take
`rollout_num_gpus_per_engine` slots each (or what `--sglang-config` says): their own, or with `--colocate` those of the
trainer ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from colloid.errors import ConfigError

PLACEMENT_DEADLINE = 120.0
"""Seconds until the cluster must have granted the slots."""


@dataclass(frozen=True)
class SlotPlan:
    """How many slots, and for whom."""

    num_trainer_ranks: int
    num_engines: int
    engine_slots: int
    """Of all engines, and of placeholders of `--sglang-config`."""
    colocate: bool

    @property
    def num_slots(self) -> int:
        if self.colocate:
            return max(self.num_trainer_ranks, self.engine_slots)
        return self.num_trainer_ranks + self.engine_slots


def reserve(plan: SlotPlan, device: str):
    """A placement group with one bundle a trainer rank; its bundles are ready.

    Raises:
        ConfigError: the cluster has fewer slots than the plan needs; with the numbers.
    """
    import ray
    from ray.util.placement_group import placement_group

    resource = "GPU" if device == "cuda" else "CPU"
    have = int(ray.cluster_resources().get(resource, 0))
    if have < plan.num_slots:
        raise ConfigError(
            f"the run needs {plan.num_slots} {resource} slots ({plan.num_trainer_ranks} trainer ranks, "
            f"{plan.num_engines} engines with {plan.engine_slots}{', colocated' if plan.colocate else ''}); the "
            f"cluster has {have}. Lower --actor-num-gpus-per-node or --rollout-num-gpus, or use --colocate"
        )
    bundle = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
    group = placement_group([bundle] * plan.num_trainer_ranks, strategy="PACK")
    if not group.wait(PLACEMENT_DEADLINE):
        raise ConfigError(
            f"the cluster did not grant {plan.num_trainer_ranks} {resource} slots for the trainer ranks within "
            f"{PLACEMENT_DEADLINE:g} s: other jobs hold them"
        )
    return group
