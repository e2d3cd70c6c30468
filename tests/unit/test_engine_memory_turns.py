"""Engines release and resume their memory while some of them fail: nobody is started in the trainer's turn."""

from __future__ import annotations

import asyncio

import pytest

from colloid.engines.members import State
from colloid.errors import EngineError
from colloid.rollout.engine_pool import EnginePool
from tests.fake_pool import World


class Fleet:
    """A fleet whose pool has the time that a test gives it."""

    def __init__(self, world: World):
        self.world, self.tolerance = world, world.pool.tolerance
        self.pause_checks, self.resume_checks = world.pool.pause, world.pool.resume
        self.hold_starts = world.pool.hold_starts

    @property
    def failure(self):
        return self.world.pool.failure

    @property
    def addresses(self):
        return [member.address for member in self.world.pool.of(State.SERVING, State.JOINING)]

    @property
    def num_starting(self):
        return len([member for member in self.world.pool.of(State.STARTING) if member.config is not None])

    def drop_silent(self, engines):
        self.world.pool.step()
        left = self.addresses
        return [engine for engine in engines if engine not in left]


def turn(world: World, change, *, releases: bool) -> None:
    """Has the engines of the world release or resume; `change` says how."""
    moved = EnginePool(Fleet(world), 8).change_memory(change, lambda: releases, releases=releases)
    asyncio.run(asyncio.wait_for(moved, 30))


def test_nobody_is_started_in_the_place_of_an_engine_that_is_lost_as_the_engines_release():
    world, asked = World(), []
    world.handles[0].exit_code = -9
    world.pool.step()  # its process has not ended yet

    def release(urls):
        asked.append(urls)
        if len(asked) == 1:
            world.handles[1].exit_code = -9
            raise EngineError("no answer")

    turn(world, release, releases=True)
    world.run()
    assert asked == [[world.handles[1].url], []], "none is left, and none is waited for"
    assert len(world.handles) == 2 and not world.pool.of(State.STARTING), "the trainer has the memory"
    world.pool.hold_starts(False)
    world.run()
    assert len(world.handles) == 4


def test_an_engine_that_is_being_started_is_there_before_the_engines_release():
    world, asked = World(), []
    world.handles[0].exit_code = -9
    world.pool.step()
    work, done = world.work.pop(0)
    done(work())  # the process has ended, its replacement is being started

    async def run():
        pool = EnginePool(Fleet(world), 8)
        moved = asyncio.ensure_future(pool.change_memory(asked.append, lambda: True, releases=True))
        await asyncio.sleep(0.1)
        assert not asked
        world.run()
        await asyncio.wait_for(moved, 30)

    asyncio.run(run())
    assert asked == [[world.handles[1].url, world.handles[2].url]]


def test_a_fleet_that_cannot_go_on_says_so_rather_than_release():
    world = World(tolerance=None)
    world.handles[0].exit_code = 3
    world.pool.step()
    with pytest.raises(EngineError, match="ended with 3"):
        turn(world, lambda urls: None, releases=True)
