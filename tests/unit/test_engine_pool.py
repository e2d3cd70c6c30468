"""The pool's state machine with engines that are made up, in time that a test moves by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from colloid.engines.control import EngineAddress
from colloid.engines.health import Health, Verdict
from colloid.engines.launch import EngineConfig
from colloid.engines.members import PoolView, Services, State, Tolerance
from colloid.engines.pool import DRAIN_SECONDS, MAX_START_FAILURES, MAX_STRIKES, RETRY_SECONDS, Pool
from colloid.engines.router_watch import MAX_RESTART_FAILURES, RouterWatch
from colloid.errors import EngineError

TOLERANCE = Tolerance(interval=10.0, timeout=5.0, first_wait=2.0)
HEALTHY = Health(Verdict.HEALTHY)


@dataclass
class Handle:
    """An engine that is whatever the test says."""

    url: str
    pid: int = 0
    log_path: Path = Path("log")
    exit_code: int | None = None
    fails: bool = False
    stopped: bool = False

    def wait_until_ready(self) -> str:
        if self.fails:
            raise EngineError(f"{self.url} does not start; the end of its log: out of memory")
        return self.url

    def how_it_ended(self, when: str = "") -> str:
        return f"ended with {self.exit_code}"

    def terminate(self) -> None:
        self.stopped = True

    def stop(self, grace: float = 5.0) -> None:
        self.stopped = True


@dataclass
class Router:
    url: str = "http://router"
    exit_code: int | None = None
    engines: list[str] = field(default_factory=list)
    silent: bool = False
    failures: int = 0

    def register(self, engine_url, role=None):
        self.engines.append(engine_url)

    def deregister(self, engine_url):
        self.engines.remove(engine_url)

    def answers(self, timeout):
        return not self.silent

    def restart(self):
        if self.failures:
            self.failures -= 1
            raise EngineError("no port")
        self.exit_code, self.silent, self.engines = None, False, []


class World:
    """Everything around a pool. What it runs in the background stands in `work` until `run`."""

    def __init__(
        self, tolerance: Tolerance | None = TOLERANCE, engines: int = 2, external: tuple[str, ...] = (), **options
    ):
        self.now = 100.0
        self.router = Router()
        self.handles: list[Handle] = []
        self.work: list = []
        self.health: dict[str, Health] = {}
        self.checked: list[str] = []
        self.running: dict[str, int] = {}
        self.missing: set[str] = set()
        self.views: list[PoolView] = []
        self.failing_starts = 0
        self.pool = Pool(
            Services(
                launch=self._launch,
                router=self.router,
                background=lambda work, done: self.work.append((work, done)),
                check=self._check,
                find=self._find,
                running=lambda engine: self.running.get(engine.url, 0),
                changed=self.views.append,
                clock=lambda: self.now,
            ),
            tolerance,
            **options,
        )
        for place in range(engines):
            handle = self._launch(CONFIG, "", place)
            self.pool.ready(self.pool.add(place, CONFIG, handle), handle.url)
        for address in external:
            self.pool.ready(self.pool.add_external(address), address)
        self.pool.admit([member.name for member in self.pool.members])
        self.watch = RouterWatch(
            self.router, self.pool, lambda work, done: self.work.append((work, done)), lambda: self.now
        )

    def run(self) -> None:
        """All work that stands in the background, and what follows from it."""
        while self.work:
            work, done = self.work.pop(0)
            try:
                result = work()
            except EngineError as error:
                result = error
            done(result)

    def pass_time(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.watch.step()
        self.pool.step()
        self.run()

    def urls(self, *states: State) -> list[str]:
        return [member.url for member in self.pool.of(*states)]

    @property
    def serving(self) -> list[str]:
        """As clients see it."""
        return [engine.url for engine in self.views[-1].serving]

    def _launch(self, config, name, index) -> Handle:
        handle = Handle(f"http://engine{index}-{len(self.handles)}", len(self.handles), fails=self.failing_starts > 0)
        self.failing_starts -= 1
        self.handles.append(handle)
        return handle

    def _check(self, engine: EngineAddress, generates: bool) -> Health:
        self.checked.append(engine.url)
        return self.health.get(engine.url, HEALTHY)

    def _find(self, address: str) -> EngineAddress:
        if address in self.missing:
            raise EngineError(f"{address}: nobody there")
        return EngineAddress(address)


CONFIG = EngineConfig("model", Path("logs"), "key")


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


def test_a_replacement_waits_while_the_trainer_has_the_memory():
    world = World()
    world.pool.hold_starts(True)
    world.handles[0].exit_code = 1
    world.pass_time()
    assert world.serving == [world.handles[1].url] and len(world.handles) == 2
    world.pool.hold_starts(False)
    world.run()
    assert world.urls(State.JOINING) == [world.handles[2].url]


ONE, TWO, THREE = (f"http://host:{port}" for port in (1, 2, 3))


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
                world.pool.pause() if chance.random() < 0.5 or not world.pool._pauses else world.pool.resume()
            world.pass_time(chance.random() * 8)
            places = [member.place for member in world.pool.of(State.STARTING, State.JOINING, State.SERVING)]
            assert len(places) == len(set(places))
            if world.pool.failure is not None:
                break
            if world.views[-1].router_up:
                assert sorted(world.router.engines) == sorted(world.serving)
            assert {0, 1, 2} <= set(places) | {m.place for m in world.pool.members} or world.work
