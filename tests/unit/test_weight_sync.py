"""Who is sent weights, and when: the driver's part, with actors that are called at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colloid.cluster.weight_sync import MAX_ATTEMPTS, WeightSync
from colloid.engines.control import EngineAddress
from colloid.errors import EngineError, WeightSyncError
from colloid.rollout.engine_pool import Joining

ONE, TWO, THREE = (EngineAddress(f"http://engine:{number}", name=f"engine_{number}") for number in (1, 2, 3))


class Actor:
    """`actor.verb.remote(…)` is a call of `verb(…)` that `wait` makes; `asked` has it also where nobody waits."""

    def __getattr__(self, name):
        call = getattr(type(self), f"_{name}")

        def remote(_verb, *arguments):
            self.asked.append((name, *arguments))
            return lambda: call(self, *arguments)

        return type("Verb", (), {"remote": remote})()


class Rank(Actor):
    def __init__(self, log, dead):
        self.log, self.dead, self.asked = log, dead, []

    def _update_weights(self, engines, key):
        self._send("update", engines)
        return {"perf/update_weights_time": 1.0}

    def _send_weights(self, engines, key):
        self._send("send", engines)

    def _check_weights(self, engines, key):
        self._send("check", engines)
        return 24

    def _send(self, what, engines):
        self.log.append((what, [engine.name for engine in engines]))
        if lost := self.dead & set(engines):
            raise WeightSyncError(f"{what}: {', '.join(engine.url for engine in lost)} did not answer")


class Rollout(Actor):
    def __init__(self, engines):
        self.engines, self.serving, self.log = list(engines), [], []
        self.blames, self.keeps, self.ended, self.asked = True, False, "", []

    def _begin_update(self, pause_mode):
        self.log.append("begin")
        return list(self.engines)

    def _check_engines(self):
        if self.ended:
            raise EngineError(self.ended)

    def _end_update(self, version, engines):
        self.log.append(f"end {version}")
        self.serving = [engine for engine in engines if engine in self.engines] or self.serving

    def _joining(self):
        return Joining([engine for engine in self.engines if engine not in self.serving], len(self.serving))

    def _admit(self, engines):
        self.serving += engines

    def _drop(self, engines, reason):
        self.engines = [engine for engine in self.engines if engine not in engines]

    def _left_after_failed_update(self, engines, words, attempt):
        if self.keeps:
            return list(engines)
        lost = [engine for engine in engines if engine.url in words] if self.blames else []
        self._drop(lost, words)
        return [] if not lost and attempt > 1 else list(self.engines)


def world(*engines, tolerates=True, checks=False):
    rollout, dead, log = Rollout(engines), set(), []
    sync = WeightSync(
        *(rollout, [Rank(log, dead)], lambda references, what: [reference() for reference in references]),
        api_key="key",
        pause_mode="retract",
        tolerates=tolerates,
        checks=checks,
        version=7,
    )
    return sync, rollout, dead, log


def test_a_sync_is_the_next_version_for_all_and_those_that_joined_serve():
    sync, rollout, _, log = world(ONE, TWO, checks=True)
    assert sync.sync() == {"perf/update_weights_time": 1.0}
    assert (sync.version, sync.is_ahead, rollout.serving, rollout.log) == (8, False, [ONE, TWO], ["begin", "end 8"])
    assert log == [("update", ["engine_1", "engine_2"]), ("check", ["engine_1", "engine_2"])]


def test_weights_are_compared_before_anything_is_generated_with_them():
    sync, rollout, dead, log = world(ONE, TWO, checks=True)
    rollout.log = log
    sync.sync()
    assert [entry if isinstance(entry, str) else entry[0] for entry in log] == ["begin", "update", "check", "end 8"]


def test_an_engine_that_fails_in_it_is_left_out_and_the_others_are_sent_it_again():
    sync, rollout, dead, log = world(ONE, TWO, THREE)
    dead.add(TWO)
    sync.sync()
    assert log == [("update", ["engine_1", "engine_2", "engine_3"]), ("update", ["engine_1", "engine_3"])]
    assert sync.version == 8 and rollout.serving == [ONE, THREE]


def test_without_the_option_it_fails_and_so_it_does_where_no_engine_is_to_blame():
    for tolerates, times in ((False, 1), (True, 2)):
        sync, rollout, dead, log = world(ONE, tolerates=tolerates)
        rollout.blames = False
        dead.add(ONE)
        with pytest.raises(WeightSyncError, match="http://engine:1 did not answer"):
            sync.sync()
        assert len(log) == times and sync.version == 7
        assert rollout.asked[-1] == ("end_update", 7, []) and rollout.log == ["begin"], "its end is not waited for"


def test_without_the_option_an_engine_that_has_ended_is_the_error():
    sync, rollout, dead, _ = world(ONE, tolerates=False)
    rollout.ended = "engine http://engine:1 (engine_1, pid 7) ended with -9"
    dead.add(ONE)
    with pytest.raises(EngineError, match="pid 7[)] ended with -9"):
        sync.sync()
    assert sync.version == 7


def test_it_is_not_repeated_forever():
    sync, rollout, dead, log = world(ONE)
    rollout.keeps = True
    dead.add(ONE)
    with pytest.raises(WeightSyncError):
        sync.sync()
    assert len(log) == MAX_ATTEMPTS


def test_while_the_trainer_is_idle_those_that_join_are_sent_the_version_alone():
    sync, rollout, _, log = world(ONE)
    sync.sync()
    rollout.engines.append(TWO)
    sync.serve_joining()
    assert log[1:] == [("send", ["engine_2"])] and rollout.serving == [ONE, TWO] and sync.version == 8
    sync.serve_joining()
    assert len(log) == 2, "nobody is left to join"


def test_where_the_trainer_is_ahead_they_wait_unless_nobody_serves():
    sync, rollout, _, log = world(ONE)
    sync.sync()
    rollout.engines.append(TWO)
    sync.is_ahead = True
    sync.serve_joining()
    assert len(log) == 1 and rollout.serving == [ONE]
    rollout.engines, rollout.serving = [TWO], []
    sync.serve_joining()
    assert log[1:] == [("update", ["engine_2"])] and rollout.serving == [TWO] and sync.version == 9


def test_one_that_does_not_take_them_is_taken_out():
    sync, rollout, dead, _ = world(ONE)
    sync.sync()
    rollout.engines.append(TWO)
    dead.add(TWO)
    sync.serve_joining()
    assert rollout.engines == rollout.serving == [ONE] and sync.version == 8


def test_of_two_that_join_the_one_that_fails_is_taken_out_and_the_other_sent_them_again():
    sync, rollout, dead, log = world(ONE)
    sync.sync()
    rollout.engines += [TWO, THREE]
    dead.add(TWO)
    sync.serve_joining()
    sync.serve_joining()
    assert log[1:] == [("send", ["engine_2", "engine_3"]), ("send", ["engine_3"])]
    assert rollout.engines == rollout.serving == [ONE, THREE]


def test_one_that_was_taken_out_of_the_list_while_it_was_sent_them_ends_no_run(monkeypatch):
    sync, rollout, dead, _ = world(ONE, tolerates=False)
    sync.sync()
    rollout.engines.append(TWO)
    dead.add(TWO)
    with pytest.raises(WeightSyncError, match="engine:2 did not answer"):
        sync.serve_joining()
    listed = [Joining([TWO], 1), Joining([], 1)]
    monkeypatch.setattr(Rollout, "_joining", lambda _self: listed.pop(0))
    sync.serve_joining()
    assert not listed and rollout.serving == [ONE]


def test_an_address_is_not_found_in_a_longer_one():
    assert ONE.is_named_in("POST http://engine:1/generate: gone") and ONE.is_named_in("http://engine:1")
    assert not ONE.is_named_in("POST http://engine:12/generate: gone")


class ComparingRank(Rank):
    """Comparisons fill SGLang's weights with random values, and leave them so where an engine fails meanwhile.

    Attributes:
        dies: verb -> the engine that dies when it is called.
    """

    def __init__(self, log, dead):
        super().__init__(log, dead)
        self.random, self.dies = set(), {}

    def _send(self, what, engines):
        self.dead |= {self.dies.pop(what)} if what in self.dies else set()
        wrong = self.random & set(engines) if what == "check" else set()
        if what == "check":
            self.random |= {engine for engine in engines if engine.kind == "sglang"}
        super()._send(what, engines)
        self.random -= set(engines)
        if wrong:
            raise WeightSyncError(f"{', '.join(engine.url for engine in wrong)}: 24 tensors different")


def test_engines_whose_comparison_another_one_broke_off_are_sent_their_weights_before_the_next():
    one, two, three = engines = [replace(engine, kind="sglang") for engine in (ONE, TWO, THREE)]
    for dies, attempts, left in (
        ({"check": two}, [("check", engines), ("send", [one, three]), ("check", [one, three])], [one, three]),
        (
            {"check": two, "send": three},
            [("check", engines), ("send", [one, three]), ("send", [one]), ("check", [one])],
            [one],
        ),
    ):
        sync, rollout, dead, log = world(*engines, checks=True)
        rank = sync._workers[0] = ComparingRank(log, dead)
        rank.dies |= dies
        sync.sync()
        assert log[1:] == [(what, [engine.name for engine in to]) for what, to in attempts]
        assert rollout.serving == left and sync.version == 8


def test_a_comparison_of_checksums_alone_is_repeated_as_it_is():
    sync, rollout, dead, log = world(ONE, TWO, checks=True)
    rank = sync._workers[0] = ComparingRank(log, dead)
    rank.dies["check"] = TWO
    sync.sync()
    assert log[1:] == [("check", ["engine_1", "engine_2"]), ("check", ["engine_1"])] and rollout.serving == [ONE]
