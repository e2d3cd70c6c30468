"""The loop of train_async.py over a real rollout manager and a fake engine, with random delays: the same run each time,
and after a resume at every checkpoint; what fails is named, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
import threading
from pathlib import Path

import pytest
from aiohttp import web

import colloid.loop
from colloid.config import parse
from colloid.config.asynchrony import least_staleness
from colloid.errors import EngineError, HookError, WeightSyncError
from colloid.rollout.manager import RolloutManager
from tests.e2e.running import metrics_of, write_sums
from tests.fake_engine import FakeEngine, seeded

ROLLOUTS = 6
DEADLINE = 60.0


class LocalRun:
    """The verbs of a `Run` in this process. The trainer's weights are a digest of everything that it was trained on,
    and what the engine says follows from the weights that it was sent."""

    resume: Path | None = None

    def __init__(self, args):
        self.args = args
        self.start_rollout_id = self.weight_version = 0
        self.serves, self.options_read = True, set()
        self.weights, self.saved_metrics = "start", {}
        self.fail_update_at = None
        self._last_started = None

    def __enter__(self):
        self.engine = FakeEngine(self._reply, lambda payload: random.random() * 0.01)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._serving = self.engine.serve()
        self._do(self._serving.__aenter__())
        self.manager = RolloutManager(self.args)
        self._do(self.manager.start(self.engine.url, [self.engine.url], "key"))
        if self.resume is not None:
            state = json.loads((self.resume / "trainer.json").read_text())
            self.weights, self.weight_version = state["weights"], state["version"]
            self.saved_metrics = state["metrics"]
            self.start_rollout_id = state["rollout_id"] + 1
            self.manager.load(self.resume, state["rollout_id"])
        return self

    def __exit__(self, *_error):
        self._do(self.manager.close())
        self._do(self._serving.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def start_rollout(self, rollout_id, weight_version, trained):
        after, self._last_started = self._last_started, rollout_id
        making = self.manager.generate(rollout_id, weight_version, trained=trained, after=after)
        return asyncio.run_coroutine_threadsafe(making, self._loop)

    def wait_for_rollout(self, rollout_id, reference):
        result = reference.result(DEADLINE)
        result.__dict__["num_tokens"] = 1
        return result

    def train(self, rollout_id, rollout):
        columns = rollout.batches[0].samples
        seen = repr([columns.tokens.tolist(), columns.rewards.tolist(), columns.weight_versions.tolist()])
        self.weights = hashlib.blake2b(f"{self.weights} {seen}".encode(), digest_size=8).hexdigest()
        return {"train/loss": int(self.weights, 16) % 10**9 / 10**9}

    def save(self, rollout_id, metrics):
        place = Path(self.args.save, f"iter_{rollout_id}")
        place.mkdir(parents=True)
        state = {"weights": self.weights, "version": self.weight_version, "rollout_id": rollout_id, "metrics": metrics}
        (place / "trainer.json").write_text(json.dumps(state))
        self._do(self._save(place, rollout_id))

    async def _save(self, place, rollout_id):
        async with self.manager.interrupted():
            self.manager.save(place, rollout_id)

    def utilization(self):
        return {}

    def sync_weights(self):
        if self.weight_version == self.fail_update_at:
            raise WeightSyncError("weight update to version 2, bucket: 1 of 1 engines failed")
        self.weight_version += 1
        self.engine.sent, self.engine.weight_version = self.weights, str(self.weight_version)
        self._do(self._release())
        return {"weight_version": float(self.weight_version)}

    async def _release(self):
        self.manager.release_requests(self.weight_version)

    def evaluate(self, rollout_id):
        return self._do(self.manager.evaluate(rollout_id))

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE)

    def _reply(self, payload):
        digest = hashlib.blake2b(f"{self.engine.sent} {seeded(payload, 1 << 30)}".encode(), digest_size=2)
        return [10 + digest.digest()[0] % 40, 60 + digest.digest()[1] % 3, 2]


@pytest.fixture
def options(tiny_model_dir, tmp_path):
    """`options(directory, *flags)` -> those of a small asynchronous run with checkpoints, a filter and a buffer."""
    data = write_sums(tmp_path / "data.jsonl", 7)
    (tmp_path / "reward.py").write_text(REWARD)

    def make(name, *flags, deterministic=True):
        words = [
            *("--hf-checkpoint", tiny_model_dir(), "--prompt-data", data, "--rollout-shuffle", "--run-name", name),
            *("--rollout-batch-size", 3, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 6),
            *("--over-sampling-batch-size", 4, "--num-rollout", ROLLOUTS, "--outputs-dir", tmp_path / "outputs"),
            *("--custom-rm-path", f"{tmp_path}/reward.py:reward", "--no-save-rollouts"),
            *("--dynamic-sampling-filter-path", "colloid.rollout.filters.check_reward_nonzero_std"),
            *(["--deterministic"] if deterministic else []),
        ]
        return parse([str(word) for word in [*words, *flags]], "train_async")

    return make


REWARD = """
import asyncio, random


async def reward(args, sample, **kwargs):
    await asyncio.sleep(random.random() * 0.01)
    return float(sample.tokens[-2] % 3)
"""


def _run(monkeypatch, args, resume=None) -> list[dict]:
    monkeypatch.setattr(colloid.loop, "Run", type("Resumed", (LocalRun,), {"resume": resume}))
    monkeypatch.setattr(colloid.loop, "summary", lambda directory: "")
    colloid.loop.train_async(args)
    return metrics_of(Path(args.run_dir))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ahead", "interval"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_delays_change_nothing_and_each_checkpoint_goes_on_as_the_straight_run(
    options, monkeypatch, tmp_path, ahead, interval
):
    flags = ["--async-buffer-size", ahead, "--update-weights-interval", interval, "--save-interval", interval]
    first = _run(monkeypatch, options("first", *flags))
    again = _run(monkeypatch, options("again", *flags))
    assert [line["step"] for line in first] == list(range(ROLLOUTS))
    assert first == again
    assert len({line["train/loss"] for line in first}) == ROLLOUTS
    assert 1 <= max(line["staleness/max"] for line in first) <= least_staleness(ahead, interval)
    resumed = range(interval - 1, ROLLOUTS - 1, interval)
    for rollout_id in resumed:
        place = tmp_path / f"outputs/first/checkpoints/iter_{rollout_id}"
        waiting = sorted(map(int, json.loads((place / "waiting_rollouts.json").read_text())))
        assert waiting == list(range(rollout_id + 1, min(rollout_id + 1 + ahead, ROLLOUTS))), "the queue is not empty"
        shutil.rmtree(tmp_path / "outputs/resumed", ignore_errors=True)
        lines = _run(monkeypatch, options("resumed", *flags), resume=place)
        assert lines == first[rollout_id + 1 :], f"resumed after rollout {rollout_id}"
    assert len(resumed) >= 2


def _manager_with(args, engine, body):
    async def run():
        async with engine.serve():
            manager = RolloutManager(args)
            await manager.start(engine.url, [engine.url], "key")
            try:
                return await asyncio.wait_for(body(manager), DEADLINE)
            finally:
                await manager.close()

    return asyncio.run(run())


async def _until(condition, what):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never {what}")


@pytest.mark.parametrize("function", ["colloid.rollout.generate", "colloid.rollout.continuous"])
def test_a_checkpoint_holds_the_tokens_of_running_samples_which_go_on(options, tmp_path, function):
    """The fake engine cuts an aborted answer to its first token; the rest comes from the request that goes on."""
    flags = ["--partial-rollout", "--rollout-function-path", f"{function}.generate_rollout"]
    args = options("partial", *flags, deterministic=False)
    args.dynamic_sampling_filter_path = None
    slow = True
    engine = FakeEngine(lambda payload: [11, 12, 13, 2], lambda payload: 30.0 if slow else 0.0)

    async def interrupt(manager):
        nonlocal slow
        making = asyncio.ensure_future(manager.generate(0, 3))
        await _until(lambda: len(engine.running) >= 6, "running")
        async with manager.interrupted():
            assert not engine.running, "they stand still"
            manager.save(tmp_path, -1)
            slow = False
        return (await making).batches[0].samples

    columns = _manager_with(args, engine, interrupt)
    _check_ends(columns, [11, 11, 12, 13, 2])
    saved = json.loads((tmp_path / "data_source.json").read_text())["in_flight"]
    partial = [sample for group in saved for sample in group if sample["response_length"]]
    assert len(partial) >= 6
    for sample in partial:
        assert (sample["status"], sample["tokens"][-1], len(sample["rollout_log_probs"])) == ("aborted", 11, 1)
    seeds = {request["sampling_params"]["sampling_seed"] for request in engine.requests}
    assert len(seeds) == len(engine.requests), "what goes on does not repeat the draws of its beginning"

    async def resume(manager):
        manager.load(tmp_path, -1)
        return (await manager.generate(0, 3)).batches[0].samples

    resumed = _manager_with(args, FakeEngine(lambda payload: [11, 12, 13, 2]), resume)
    _check_ends(resumed, [11, 11, 12, 13, 2])


def _check_ends(columns, response):
    """Each response is this: the first token of one request, and the answer to the one that went on."""
    assert columns.num_samples == 6
    for row in range(6):
        assert columns.tokens[columns.offsets[row] : columns.offsets[row + 1]].tolist()[-len(response) :] == response


def test_without_partial_rollout_a_checkpoint_hands_out_again_what_is_running(options, tmp_path):
    args = options("whole", deterministic=False)
    engine = FakeEngine(lambda payload: [11, 12, 13, 2], lambda payload: 30.0)

    async def body(manager):
        making = asyncio.ensure_future(manager.generate(0, 3))
        await _until(lambda: len(engine.running) == 8, "running")
        async with manager.interrupted():
            manager.save(tmp_path, -1)
        assert len(engine.running) == 8 and not engine.aborts
        making.cancel()

    _manager_with(args, engine, body)
    saved = json.loads((tmp_path / "data_source.json").read_text())["in_flight"]
    assert [sample["response_length"] for group in saved for sample in group] == [0] * 8
    assert [group[0]["group_index"] for group in saved] == [0, 1, 2, 3]


def test_a_failed_update_ends_the_run_and_says_so(options, monkeypatch):
    class Failing(LocalRun):
        def __enter__(self):
            self.fail_update_at = 1
            return super().__enter__()

    monkeypatch.setattr(colloid.loop, "Run", Failing)
    with pytest.raises(WeightSyncError, match="weight update to version 2"):
        colloid.loop.train_async(options("failing", deterministic=False))


def test_an_engine_that_breaks_while_the_trainer_trains_is_named_where_its_rollout_is_needed(options, monkeypatch):
    class Breaking(LocalRun):
        def train(self, rollout_id, rollout):
            self.engine.reply = lambda payload: web.Response(status=500, text="engine on fire")
            return super().train(rollout_id, rollout)

    monkeypatch.setattr(colloid.loop, "Run", Breaking)
    with pytest.raises(EngineError, match="status 500: engine on fire"):
        colloid.loop.train_async(options("breaking", deterministic=False))


def test_a_judge_that_does_not_answer_fails_its_samples_and_the_run_says_so(options, monkeypatch, tmp_path):
    args = options("judge", deterministic=False)
    args.dynamic_sampling_filter_path = None
    late = "    await asyncio.sleep(0.05)\n    raise TimeoutError('the judge is asleep')\n"
    (tmp_path / "reward.py").write_text("import asyncio\n\n\nasync def reward(args, sample, **kwargs):\n" + late)
    monkeypatch.setattr(colloid.loop, "Run", LocalRun)
    with pytest.raises(HookError, match="all .* samples .* FAILED.*the judge is asleep"):
        colloid.loop.train_async(args)


def test_what_waits_in_the_buffer_and_is_too_old_starts_anew(options):
    """Rollout 0 leaves a finished group over; when rollout 1 is trained, two updates have come since."""
    for bound, stale in ((2, 0), (1, 1)):
        args = options(f"bound-{bound}", "--max-staleness", bound)
        args.dynamic_sampling_filter_path = None
        engine = FakeEngine(lambda payload: [11, 12, 13, 2])

        async def two_rollouts(manager, engine=engine):
            await manager.generate(0, 3)
            engine.weight_version = "5"
            return await manager.generate(1, 5)

        result = _manager_with(args, engine, two_rollouts)
        assert result.metrics["rollout/num_stale_groups"] == stale
        assert result.batches[0].samples.weight_versions.min() == (5 if stale else 3)
        assert len(engine.requests) == 2 * (4 + 3 + stale), "one group of the second rollout was finished"


def test_a_rollout_that_waits_and_is_too_old_after_a_resume_is_made_anew_of_the_same_prompts(options, tmp_path):
    args = options("late", "--max-staleness", 1, deterministic=False)
    args.dynamic_sampling_filter_path = None

    async def save(manager):
        await manager.generate(0, 3)
        manager.save(tmp_path, -1)

    _manager_with(args, FakeEngine(lambda payload: [11, 12, 13, 2]), save)
    saved = json.loads((tmp_path / "waiting_rollouts.json").read_text())["0"]["groups"]
    for version, requests in ((4, 0), (5, 6)):
        engine = FakeEngine(lambda payload: [21, 22, 23, 2])
        engine.weight_version = str(version)

        async def resume(manager, version=version):
            manager.load(tmp_path, -1)
            return (await manager.generate(0, version)).batches[0].samples

        columns = _manager_with(args, engine, resume)
        assert len(engine.requests) >= requests and (not engine.requests) == (version == 4)
        assert version - columns.weight_versions.min() <= 1
        if requests:
            prompts = {tuple(sample["tokens"][: -sample["response_length"]]) for group in saved for sample in group}
            assert prompts <= {tuple(request["input_ids"]) for request in engine.requests}
