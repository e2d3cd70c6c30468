"""What user code inside a rollout can reach without being handed it: the client, the tokenizer, the options.

The manager sets the context for the tasks of its rollouts; outside of a rollout there is none.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from colloid.errors import HookError
from colloid.rollout.client import EngineClient


@dataclass(frozen=True)
class RolloutContext:
    """One manager's shared parts."""

    args: Any
    client: EngineClient
    tokenizer: Any
    grader: Any
    """`colloid.rollout.grading.Grader`."""


_CONTEXT: contextvars.ContextVar[RolloutContext | None] = contextvars.ContextVar("colloid_rollout", default=None)


@contextmanager
def use_context(context: RolloutContext) -> Iterator[None]:
    """Tasks started inside see `context`."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def current_context() -> RolloutContext:
    """The context of the running rollout.

    Raises:
        HookError: there is none.
    """
    context = _CONTEXT.get()
    if context is None:
        raise HookError(
            "colloid.rollout.post and its like work only inside a rollout, in the rollout manager's process"
        )
    return context


async def post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
    """POSTs JSON to a server of this run (the router, an engine) with its key, and returns the JSON answer."""
    return await current_context().client.post(url, payload)


def get_model_url(args: Any = None, model_name: str = "default", endpoint: str = "/generate") -> str:
    """The address of `endpoint` at the router that serves the policy.

    Args:
        args: not used; hooks hand it in.
        model_name: one model is served yet: `default`.
    """
    if model_name not in ("default", "actor", "policy"):
        raise HookError(f"get_model_url: there is no model {model_name!r}; only the policy ('default') is served yet")
    return f"{current_context().client.router_url}/{endpoint.lstrip('/')}"
