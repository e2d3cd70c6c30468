"""From prompts to training batches. The names offered here are for generate functions of users."""

from __future__ import annotations

from typing import Any

__all__ = ["generate_single", "get_model_url", "post"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from colloid.rollout import context

    return getattr(context, name)
