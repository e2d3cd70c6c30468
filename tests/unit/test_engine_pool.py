"""The pool's state machine with engines that are made up, in time that a test moves by hand."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from colloid.engines.health import Health, Verdict
from colloid.engines.members import State, Tolerance
from colloid.engines.pool import MAX_START_FAILURES, MAX_STRIKES, RETRY_SECONDS
from colloid.engines.router_watch import MAX_RESTART_FAILURES
from colloid.errors import EngineError
from tests.fake_pool import HEALTHY, ONE, THREE, TOLERANCE, TWO, World


def test_an_engine_that_ended_is_taken_out_before_another_is_started_in_its_place():
    world = World()
    first, second = world.handles
    first.exit_code = -9
    world.pool.step()
    assert world.router.engines == world.serving == [second.url] and world.views[-1].losses == 1
    assert len(world.handles) == 2, "its process has to have ended first"
    world.run()
    third = world.handles[2]
    assert first.stopped and world.urls(State.JOINING) == [third.url]
    assert world.serving == [second.url], "it lacks the weights"
    world.pool.admit([member.name for member in world.pool.members])
    assert world.serving == world.router.engines == [second.url, third.url]
    assert [member.name for member in world.pool.members] == ["engine_1", "engine_0.1"]
    assert (world.pool.counts.replaced, world.pool.failure) == (1, None)


def test_an_engine_that_was_admitted_already_or_is_gone_is_left_as_it_is():
    world = World()
    world.pool.admit(["engine_0", "engine_7"])
    assert world.router.engines == [handle.url for handle in world.handles]


def test_an_engine_that_needs_no_weights_serves_at_once():
    world = World(gets_weights=False)
    world.handles[0].exit_code = 1
    world.pass_time()
    assert world.serving == [world.handles[1].url, world.handles[2].url]


def test_without_a_tolerance_the_first_failure_is_the_last():
    world = World(tolerance=None)
    world.handles[1].exit_code = 3
    world.pass_time()
    assert "engine_1, pid 1) ended with 3" in str(world.pool.failure) and len(world.handles) == 2
    world = World(tolerance=None)
    world.router.exit_code = -9
    world.pass_time()
    assert "the router http://router ended with -9" in str(world.pool.failure)


def test_checks_begin_after_the_first_wait_and_come_at_their_interval():
    world = World(engines=1)
    times = []
    for _ in range(30):
        world.pass_time(1.0)
        times += [world.now - 100.0] * (len(world.checked) - len(times))
    assert times == [2.0, 12.0, 22.0]


def test_an_engine_that_does_not_answer_is_killed_and_replaced():
    world = World()
    silent = world.handles[0]
    world.health[silent.url] = Health(Verdict.LOST, "no answer in 5 s")
    world.pass_time(2.0)
    assert silent.stopped and silent.url not in world.serving and len(world.handles) == 3


def test_a_wrong_answer_is_chance_and_several_in_a_row_are_not():
    world = World(engines=1)
    url = world.handles[0].url
    world.health[url] = Health(Verdict.BROKEN, "no meta_info")
    for _ in range(MAX_STRIKES - 1):
        world.pass_time(2.0)
    world.health[url] = HEALTHY
    world.pass_time(2.0)
    world.health[url] = Health(Verdict.BROKEN, "no meta_info")
    for _ in range(MAX_STRIKES - 1):
        world.pass_time(TOLERANCE.interval)
    assert world.serving == [url]
    world.pass_time(2.0)
    assert world.serving == [] and world.pool.counts.lost == 1


def test_an_engine_whose_requests_make_no_tokens_is_replaced_and_an_idle_one_is_not():
    world = World(Tolerance(interval=1.0, timeout=5.0))
    stuck, idle = (handle.url for handle in world.handles)
    world.health[stuck], world.health[idle] = Health(Verdict.HEALTHY, "", 3, 70.0), Health(Verdict.HEALTHY, "", 0, 70.0)
    for _ in range(5):
        world.pass_time(1.0)
    world.health[stuck] = Health(Verdict.HEALTHY, "", 3, 71.0)
    for _ in range(6):
        world.pass_time(1.0)
    assert world.serving == [stuck, idle]
    world.pass_time(1.0)
    assert world.serving == [idle]


def test_nothing_is_checked_while_engines_are_paused_but_an_end_is_seen():
    world = World()
    world.health = {handle.url: Health(Verdict.LOST) for handle in world.handles}
    world.now += 2.0
    world.pool.step()
    world.pool.pause()
    world.run()  # answers of checks from before count no more
    assert len(world.serving) == 2
    world.pass_time(100.0)
    assert len(world.serving) == 2
    world.handles[0].exit_code = 1
    world.pass_time()
    assert world.serving == [world.handles[1].url]
    world.pool.resume()
    world.pass_time()
    assert world.serving == []


def test_an_engine_that_does_not_start_again_ends_the_run_with_its_words():
    world = World()
    world.failing_starts = MAX_START_FAILURES
    world.handles[0].exit_code = 1
    world.pass_time()
    assert "3 times in a row" in str(world.pool.failure) and "out of memory" in str(world.pool.failure)
    assert len(world.handles) == 2 + MAX_START_FAILURES
    world = World()
    world.failing_starts = MAX_START_FAILURES - 1
    world.handles[0].exit_code = 1
    world.pass_time()
    assert world.pool.failure is None and world.urls(State.JOINING) == [world.handles[-1].url]


def test_engines_that_are_lost_as_soon_as_they_are_given_weights_end_the_run():
    world = World()
    world.handles[0].exit_code = 1
    for _ in range(MAX_START_FAILURES):
        world.pass_time()
        assert world.pool.failure is None
        world.pool.lose(world.pool.of(State.JOINING)[0], "does not take weights")
    assert "does not take weights" in str(world.pool.failure)


def test_an_examination_checks_all_that_serve_and_says_when_it_is_through():
    world = World()
    said = []
    world.health[world.handles[0].url] = Health(Verdict.LOST)
    world.pool.examine(lambda: said.append(len(world.serving)))
    assert said == []
    world.run()
    assert said == [1]
    world.pool.pause()
    world.pool.examine(lambda: said.append("paused"))
    assert said == [1, "paused"]


def test_a_router_that_ended_is_started_again_and_given_those_that_serve():
    world = World()
    world.router.exit_code, world.router.failures = -9, MAX_RESTART_FAILURES - 1
    world.watch.step()
    assert not world.views[-1].router_up and world.views[-1].losses == 1
    world.handles[0].exit_code = 1  # meanwhile
    world.run()
    world.pass_time()
    assert world.views[-1].router_up and world.watch.restarted == 1
    assert world.router.engines == world.serving == [world.handles[1].url]


def test_a_router_that_hangs_is_started_again_and_one_that_never_comes_ends_the_run():
    world = World()
    world.router.silent = True
    world.pass_time(TOLERANCE.interval)
    assert world.watch.restarted == 1 and world.router.engines == [handle.url for handle in world.handles]
    world.router.exit_code, world.router.failures = 1, MAX_RESTART_FAILURES
    world.pass_time()
    assert "the router could not be started 3 times in a row" in str(world.pool.failure)


def test_a_router_is_not_started_again_once_the_fleet_is_stopped():
    world = World()
    world.router.silent = True
    world.now += TOLERANCE.interval
    world.watch.step()  # asks it, and meanwhile:
    world.pool.closed, world.router.stopped = True, True
    world.run()
    world.watch.step()
    assert world.router.stopped and world.watch.restarted == 0
    world = World()
    world.router.exit_code = -9
    world.watch.step()  # starts another, and meanwhile:
    world.pool.closed, world.router.stopped = True, True
    world.run()
    assert world.router.exit_code is None and world.router.stopped, "it came up, and is ended"


@pytest.mark.parametrize("is_here", [True, False])
def test_requests_at_an_engine_that_was_lost_are_cut_where_its_end_may_not_show(is_here):
    world = World()
    world.handles[0].exit_code, world.handles[0].is_here = -9, is_here
    world.pool.step()
    assert (world.views[-1].losses, world.views[-1].cuts) == (1, 0 if is_here else 1)


@pytest.mark.parametrize("tolerance", [None, TOLERANCE], ids=["without tolerance", "with it"])
def test_an_engine_that_the_router_does_not_take_gets_no_requests_from_it_later(tolerance):
    world = World(tolerance, engines=0, external=(ONE,))
    world.pool.follow([ONE, TWO])
    world.pass_time(RETRY_SECONDS)
    world.router.slow = TWO
    with pytest.raises(EngineError) if tolerance is None else nullcontext():
        world.pool.admit([TWO])
    assert world.router.engines == world.serving == [ONE]


def test_a_replacement_waits_while_the_trainer_has_the_memory():
    world = World()
    world.pool.hold_starts(True)
    world.handles[0].exit_code = 1
    world.pass_time()
    assert world.serving == [world.handles[1].url] and len(world.handles) == 2
    world.pool.hold_starts(False)
    world.run()
    assert world.urls(State.JOINING) == [world.handles[2].url]


def test_what_is_started_while_the_pool_closes_is_ended():
    world = World()
    world.handles[0].exit_code = 1
    world.pool.step()
    work, done = world.work.pop(0)
    done(work())  # the process has ended, its replacement is to be started
    world.pool.closed = True
    world.run()
    assert world.handles[2].stopped and not world.urls(State.JOINING)


@pytest.mark.parametrize("tolerance", [None, TOLERANCE], ids=["without tolerance", "with it"])
def test_each_place_has_one_member_at_most_whatever_happens(tolerance):
    import random

    for seed in range(60):
        chance = random.Random(seed)
        world = World(tolerance, engines=3, external=(ONE, TWO))
        for _ in range(80):
            what = chance.randrange(8)
            if what == 0:
                chance.choice(world.handles).exit_code = -9
            elif what == 1 and world.serving:
                world.health = {chance.choice(world.serving): Health(chance.choice(list(Verdict)))}
            elif what == 2:
                world.pool.admit([member.name for member in world.pool.members])
            elif what == 3:
                world.pool.follow(chance.sample([ONE, TWO, THREE], chance.randrange(1, 4)))
            elif what == 4:
                world.failing_starts = chance.randrange(2)
            elif what == 5:
                world.router.exit_code = chance.choice([None, 1])
            elif what == 6:
                world.pool.pause() if chance.random() < 0.5 or not world.pool.num_pauses else world.pool.resume()
            world.pass_time(chance.random() * 8)
            places = [member.place for member in world.pool.of(State.STARTING, State.JOINING, State.SERVING)]
            assert len(places) == len(set(places))
            urls = world.urls(State.JOINING, State.SERVING, State.LEAVING)
            assert len(urls) == len(set(urls))
            if world.pool.failure is not None:
                break
            if world.views[-1].router_up:
                assert sorted(world.router.engines) == sorted(world.serving)
            assert {0, 1, 2} <= set(places) | {m.place for m in world.pool.members} or world.work
