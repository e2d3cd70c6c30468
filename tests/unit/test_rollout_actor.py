"""The rollout actor's own part: it answers while engines start, and nobody waits for a newcomer."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from colloid.engines.control import EngineAddress
from colloid.errors import EngineError
from colloid.rollout import actor as module
from colloid.rollout.actor import RolloutActor


@pytest.fixture
def actor(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "setup_logging", lambda run_dir, name: None)
    return RolloutActor(SimpleNamespace(run_dir=str(tmp_path), num_rollout=None))


def test_it_answers_while_engines_start(actor, monkeypatch):
    answered = threading.Event()

    class Servers:
        def __init__(self, *_arguments):
            pass

        def start(self):
            raise EngineError("it has answered" if answered.wait(10) else "no answer")

    monkeypatch.setattr(module, "Servers", Servers)
    monkeypatch.setattr(module, "serves", lambda args: True)

    async def run():
        starting = asyncio.ensure_future(actor.start(1, None, None))
        await asyncio.sleep(0)
        answered.set()
        await starting

    with pytest.raises(EngineError, match="it has answered"):
        asyncio.run(run())


def test_requests_go_on_after_an_update_before_the_router_has_taken_a_newcomer():
    """It may hang, which the router knows after a minute only."""
    released, seen = threading.Event(), []
    newcomer = EngineAddress("http://host:1", "embedded", "engine_1")

    def admit(engines):
        seen.append((engines, released.wait(10)))

    actor = object.__new__(RolloutActor)
    actor._pool = SimpleNamespace(fleet=SimpleNamespace(resume_checks=lambda: None, admit=admit))
    actor._manager = SimpleNamespace(release_requests=lambda version: released.set())
    asyncio.run(actor.end_update(3, [newcomer]))
    assert seen == [([newcomer], True)]


def test_the_engines_of_an_update_are_those_from_which_on_none_leaves():
    engines = ["one", "two"]

    async def targets():
        return list(engines)

    actor = object.__new__(RolloutActor)
    actor._pool = SimpleNamespace(targets=targets, fleet=SimpleNamespace(pause_checks=lambda: engines.remove("one")))
    assert asyncio.run(actor.begin_update("in_place")) == ["two"]
