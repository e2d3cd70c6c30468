"""colloid's own options: one table, by group, from which parsing, `--help` and `docs/options.md` are made.

Each module holds the rows of one subject. A row whose value is refused says why, and what to take instead (`refused`).
"""

from __future__ import annotations

from colloid.config.option import Option
from colloid.config.schema import data, loss, observe, rollout, run, training

GROUPS: dict[str, tuple[Option, ...]] = {
    "run": run.RUN,
    "cluster": run.CLUSTER,
    "model and checkpoints": training.CHECKPOINTS,
    "data": data.DATA,
    "batch sizes": data.BATCH,
    "rollout": rollout.ROLLOUT,
    "rewards": data.REWARDS,
    "evaluation": rollout.EVALUATION,
    "algorithm": loss.ALGORITHM,
    "off-policy correction": loss.CORRECTION,
    "training": training.TRAINING,
    "weight updates": training.WEIGHTS,
    "asynchronous training": rollout.ASYNC,
    "hooks": rollout.HOOKS,
    "fault tolerance": run.FAULTS,
    "logging": observe.LOGGING,
    "debugging": observe.DEBUG,
    "on-policy distillation": loss.DISTILLATION,
    "external services": observe.SERVICES,
}


def options() -> list[Option]:
    """All rows, each with its group."""
    from dataclasses import replace

    return [replace(row, group=group) for group, rows in GROUPS.items() for row in rows]
