"""colloid: LLM post-training by reinforcement learning. Megatron-Core trains, SGLang generates.

The names that hooks of users rely on are loaded when they are first used: importing colloid imports neither torch nor
Ray.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "Sample": "colloid.data.sample",
    "RolloutDataSource": "colloid.data.source",
    "RolloutDataSourceWithBuffer": "colloid.data.source",
    "DynamicFilterOutput": "colloid.rollout.types",
    "RolloutFnEvalOutput": "colloid.rollout.types",
    "RolloutFnTrainOutput": "colloid.rollout.types",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
