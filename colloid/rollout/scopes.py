"""Which rollout a request belongs to, so that those of a rollout are aborted together; which answers were cut short."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager


class RequestScope:
    """The requests of one rollout, so that they can be aborted together."""

    def __init__(self) -> None:
        self.active: set[str] = set()
        self.aborted = False


SCOPE: contextvars.ContextVar[RequestScope | None] = contextvars.ContextVar("colloid_request_scope", default=None)


@contextmanager
def outside_scopes() -> Iterator[None]:
    """Requests made inside belong to no scope: no abort of a rollout ends them."""
    token = SCOPE.set(None)
    try:
        yield
    finally:
        SCOPE.reset(token)


_CUTS: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("colloid_cuts", default=None)


def watch_cuts() -> list[str]:
    """A list that grows by each answer, in this task and those that it starts, that an abort cut short."""
    cuts: list[str] = []
    _CUTS.set(cuts)
    return cuts


def note_cut(name: str) -> None:
    """An answer was cut short by the abort of its rollout."""
    cuts = _CUTS.get()
    if cuts is not None:
        cuts.append(name)
