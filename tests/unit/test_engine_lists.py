"""Engines that run already come and go with their list: the pool's state machine, as in test_engine_pool.py."""

from __future__ import annotations

from types import SimpleNamespace

from colloid.engines.fleet import Fleet, FleetConfig
from colloid.engines.health import Health, Verdict
from colloid.engines.members import State
from colloid.engines.pool import DRAIN_SECONDS, RETRY_SECONDS
from tests.fake_pool import ONE, THREE, TWO, World


def test_engines_join_a_list_and_leave_it_once_their_requests_have_ended():
    world = World(tolerance=None, engines=0, external=(ONE, TWO))
    world.running[ONE] = 4
    world.pool.follow([TWO, THREE])
    assert world.serving == world.router.engines == [TWO]
    assert [engine.url for engine in world.views[-1].leaving] == [ONE]
    world.pass_time()
    assert world.urls(State.JOINING) == [THREE] and world.urls(State.LEAVING) == [ONE]
    world.pool.admit([THREE])
    assert world.serving == [TWO, THREE]
    world.running[ONE] = 0
    world.pass_time(1.0)
    assert world.urls(State.LEAVING) == [] and not world.views[-1].leaving
    assert world.views[-1].losses == 0, "none of its requests failed"


def test_a_leaving_engine_that_is_lost_does_not_come_back():
    world = World(engines=0, external=(ONE, TWO))
    world.running[ONE] = 1
    world.pool.follow([TWO])
    world.pool.lose(world.pool.of(State.LEAVING)[0], "is gone")
    world.pass_time(RETRY_SECONDS)
    assert [member.place for member in world.pool.members] == [TWO]


def test_requests_that_hold_a_leaving_engine_are_done_elsewhere():
    world = World(tolerance=None, engines=0, external=(ONE, TWO))
    world.running[ONE] = 1
    world.pool.follow([TWO])
    world.pass_time(DRAIN_SECONDS)
    assert not world.views[-1].expelled
    world.pass_time(RETRY_SECONDS)
    assert world.views[-1].expelled == {ONE} and world.views[-1].losses == 1
    world.pass_time(DRAIN_SECONDS + RETRY_SECONDS)
    assert not world.pool.of(State.LEAVING) and not world.views[-1].expelled
    assert (world.views[-1].losses, world.views[-1].cuts) == (2, 1), "what is left there is not waited for"
    assert (world.pool.counts.left, world.pool.counts.lost, world.pool.failure) == (0, 1, None)


def test_requests_at_a_leaving_engine_that_does_not_answer_are_done_elsewhere():
    world = World(tolerance=None, engines=0, external=(ONE, TWO))
    world.running[ONE] = 1
    world.pool.follow([TWO])
    world.pass_time()
    world.missing = {ONE}
    world.pass_time(RETRY_SECONDS)
    assert not world.pool.of(State.LEAVING) and world.serving == [TWO]
    assert (world.views[-1].losses, world.views[-1].cuts) == (1, 1)
    assert (world.pool.counts.left, world.pool.counts.lost, world.pool.failure) == (0, 1, None)


def test_no_engine_leaves_for_good_while_weights_are_sent():
    world = World(tolerance=None, engines=0, external=(ONE, TWO))
    world.pool.pause()
    world.pool.follow([TWO])
    world.pass_time(RETRY_SECONDS)
    assert world.urls(State.LEAVING) == [ONE], "it may be sent weights, and only who has left may be ended"
    world.pool.resume()
    world.pass_time()
    assert not world.pool.of(State.LEAVING) and world.pool.counts.left == 1


def test_the_list_is_not_read_while_weights_are_sent():
    world = World(tolerance=None, engines=0, external=(ONE, TWO))
    fleet = Fleet(FleetConfig())
    fleet._pool, fleet._watch, fleet._file = world.pool, world.watch, SimpleNamespace(changed=lambda: [TWO])
    world.pool.pause()
    fleet._look()
    assert world.serving == [ONE, TWO]
    world.pool.resume()
    fleet._look()
    assert world.serving == [TWO]


def test_an_engine_that_is_listed_again_while_it_leaves_joins_once_it_has_left():
    world = World(tolerance=None, engines=0, external=(ONE, TWO))
    world.running[ONE] = 1
    world.pool.follow([TWO])
    world.pool.follow([ONE, TWO])
    world.pass_time(RETRY_SECONDS)
    assert world.urls(State.LEAVING) == [ONE] and not world.pool.of(State.JOINING)
    world.running[ONE] = 0
    world.pass_time(RETRY_SECONDS)
    world.pass_time(RETRY_SECONDS)
    assert not world.pool.of(State.LEAVING) and world.urls(State.JOINING) == [ONE]
    world.pool.admit([f"{ONE}.1"])
    assert world.serving == world.router.engines == [TWO, ONE]


def test_an_engine_of_the_list_that_does_not_answer_joins_once_it_does():
    world = World(tolerance=None, engines=0, external=(ONE,))
    world.missing = {TWO}
    world.pool.follow([ONE, TWO])
    for _ in range(3):
        world.pass_time(RETRY_SECONDS)
    assert world.urls(State.JOINING) == []
    world.missing.clear()
    world.pass_time(RETRY_SECONDS)
    assert world.urls(State.JOINING) == [TWO]
    world.pool.follow([ONE])  # and is not wanted any more
    assert [member.place for member in world.pool.members] == [ONE]


def test_an_engine_of_the_list_that_was_lost_comes_back_without_weights():
    world = World(engines=0, external=(ONE, TWO))
    world.health[ONE] = Health(Verdict.LOST)
    world.pass_time(2.0)
    assert world.serving == [TWO] and world.views[-1].cuts == 1, "what runs there is not ended by anything"
    world.pass_time(RETRY_SECONDS)
    assert world.urls(State.JOINING) == [ONE] and world.serving == [TWO]
    world.pool.admit([f"{ONE}.1"])
    assert world.serving == [TWO, ONE] and world.pool.counts.replaced == 1
