"""Rollouts that a server outside makes: a small one in the test's event loop, with what can go wrong between."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from colloid.config import parse
from colloid.config.services import ALSO, ROLLOUT_FUNCTION
from colloid.errors import ConfigError, DeadlineExceeded, HookError
from colloid.rewards.remote import RemoteReward
from colloid.rollout.manager import RolloutManager
from colloid.rollout.trajectories import TRAINED
from colloid.rollout.trajectory_client import TrajectoryServer
from tests.fake_engine import FakeEngine
from tests.serving import serving

SAMPLES = 2


class BufferServer:
    """Hands out `ready` groups an answer; each prompt of the input file is a group of two trajectories.

    Attributes:
        failures: answers with status 500 before the next one that is good.
    """

    def __init__(self, groups: int = 20, ready: int = 3, failures: int = 0, data_as_list: bool = False):
        self.groups, self.ready, self.failures, self.as_list = groups, ready, failures, data_as_list
        self.started: list[dict] = []
        self.asked = 0
        self.next = 0
        self.url = ""

    @asynccontextmanager
    async def serve(self):
        app = web.Application()
        app.router.add_post("/start_rollout", self._start)
        app.router.add_post("/get_rollout_data", self._get)
        async with serving(app) as self.url:
            yield self

    async def _start(self, request):
        self.started.append(await request.json())
        return web.json_response({"message": "Rollout started"})

    async def _get(self, request):
        self.asked += 1
        if self.failures:
            self.failures -= 1
            return web.Response(status=500, text="broken")
        skipped = self.started[-1]["skip_instance_ids"] if self.started else []
        items = []
        while self.next < self.groups and len(items) < SAMPLES * self.ready:
            items += [] if self.next in skipped else [trajectory(self.next, number) for number in range(SAMPLES)]
            self.next += 1
        meta = {"total_samples": len(items) + 2, "avg_reward": 0.25, "finished_groups": []}
        data = [{"data": item} for item in items] if self.as_list else {"data": items, "meta_info": meta}
        return web.json_response({"success": bool(items), "message": "", "data": data})


def trajectory(instance: int, number: int) -> dict:
    messages = [
        {"role": "user", "content": f"What is {instance} + 1?"},
        {"role": "assistant", "content": f"{instance + 1 + number}"},
        {"role": "user", "content": "Are you sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    reason = "length" if (instance, number) == (1, 1) else "stop"
    return {
        "uid": f"{instance}-{number}",
        "instance_id": instance,
        "messages": messages,
        "reward": float(number == 0),
        "extra_info": {"finish_reason": reason, "timestamp": str(100 - instance)},
    }


async def taken(server: BufferServer, count: int, at_least: int | None = None, **options):
    client = TrajectoryServer(server.url, **options)
    try:
        return await client.take(count, at_least or count)
    finally:
        await client.close()


@pytest.mark.parametrize("as_list", [False, True])
def test_groups_are_collected_until_there_are_enough(as_list):
    async def run():
        async with BufferServer(data_as_list=as_list).serve() as server:
            groups, told = await taken(server, 5)
            assert [[item.instance_id for item in group] for group in groups] == [[n, n] for n in range(5)]
            assert server.asked == 2
            return told

    told = asyncio.run(run())
    wanted = {"rollout/no_filter/total_samples": 16.0, "rollout/no_filter/avg_reward": 0.25}
    assert told == ({} if as_list else wanted)


def test_failures_are_repeated_and_counted_anew_after_each_answer():
    async def run():
        async with BufferServer(failures=2).serve() as server:
            groups, _ = await taken(server, 3, retries=2)
            assert len(groups) == 3
            server.failures = 3
            with pytest.raises(DeadlineExceeded, match="failed 3 times: .*status 500.*0 of 3 groups are there"):
                await taken(server, 3, retries=2)

    asyncio.run(run())


def test_a_server_that_makes_nothing_more_is_given_up_and_enough_is_trained():
    async def run():
        async with BufferServer(groups=4).serve() as server:
            groups, _ = await taken(server, 6, at_least=4, nothing_new=0.5)
            assert len(groups) == 4
            with pytest.raises(DeadlineExceeded, match=r"no new trajectory in 0 s; 0 of 2 groups are there"):
                await taken(server, 2, nothing_new=0.4)

    asyncio.run(run())


def test_what_is_no_rollout_buffer_is_named_at_once():
    async def run():
        async with BufferServer().serve() as server:
            client = TrajectoryServer(f"{server.url}/elsewhere")
            with pytest.raises(HookError, match="status 404"):
                await client.start({})
            await client.close()

    asyncio.run(run())


@pytest.fixture
def run_args(tiny_model_dir, tmp_path):
    def make(url: str, *flags: str):
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"What is {i} + 1?"}) + "\n" for i in range(20)))
        base = {
            "--hf-checkpoint": str(tiny_model_dir()),
            "--prompt-data": str(data),
            "--rollout-batch-size": "4",
            "--n-samples-per-prompt": str(SAMPLES),
            "--rollout-max-response-len": "6",
            "--num-rollout": "3",
            "--outputs-dir": str(tmp_path / "outputs"),
            "--rollout-buffer-url": url,
        }
        return parse([*(word for pair in base.items() for word in pair), *flags], "train")

    return make


def with_server(run_args, body, *flags: str, **server):
    async def run():
        engine = FakeEngine(lambda payload: [5, 6])
        async with engine.serve(), BufferServer(**server).serve() as buffer:
            args = run_args(buffer.url, *flags)
            manager = RolloutManager(args)
            await manager.start(engine.url, [engine.url], "the key")
            try:
                return await body(manager, buffer, args, engine)
            finally:
                await manager.close()

    return asyncio.run(run())


def test_a_rollout_is_what_the_server_made_with_the_runs_engines(run_args, tiny_model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir())

    async def body(manager, buffer, args, engine):
        assert args.rollout_function_path == ROLLOUT_FUNCTION
        result = await manager.generate(0)
        (asked,) = buffer.started
        assert asked["remote_engine_url"] == engine.url and asked["remote_engine_api_key"] == "the key"
        assert asked["input_file"] == args.prompt_data[0] and asked["num_repeat_per_sample"] == "2"
        assert (asked["task_type"], asked["skip_instance_ids"]) == ("code", [])
        assert asked["sampling_params"] == {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0}
        return result, (await manager.generate(1)).metrics

    result, second = with_server(run_args, body, "--rollout-task-type", "code")
    columns = result.batches[0].samples
    assert sorted(columns.sample_ids.tolist()) == list(range(8))
    for row, sample_id in enumerate(columns.sample_ids.tolist()):
        ids = columns.tokens[columns.offsets[row] : columns.offsets[row + 1]]
        start, end = columns.response_offsets[row], columns.response_offsets[row + 1]
        trained = ids[-(end - start) :][columns.loss_mask[start:end] == 1]
        said = tokenizer.decode(trained, skip_special_tokens=True)
        instance, number = divmod(sample_id, 2)
        assert columns.raw_rewards[row] == (number == 0)
        assert said == f"{instance + 1 + number}yes", "only what the assistant says is trained"
        cut = (instance, number) == (1, 1)
        assert (trained[-1] == tokenizer.eos_token_id) != cut, "a response that was cut off has no end"
    assert result.metrics["rollout/truncated_ratio"] == 1 / 8
    assert result.metrics["rollout/no_filter/avg_reward"] == second["rollout/no_filter/avg_reward"] == 0.25


def test_a_resumed_run_tells_the_server_what_was_trained(run_args, tmp_path):
    async def first(manager, buffer, args, engine):
        await manager.generate(0)
        manager.save(tmp_path, 0)

    async def second(manager, buffer, args, engine):
        manager.load(tmp_path, 0)
        assert manager._source.metadata[TRAINED] == [0, 1, 2, 3]
        result = await manager.generate(1)
        assert buffer.started[0]["skip_instance_ids"] == [0, 1, 2, 3]
        return result.batches[0].samples.sample_ids.tolist()

    with_server(run_args, first)
    assert with_server(run_args, second) == list(range(8, 16))


def test_a_trajectory_that_cannot_be_trained_is_left_out_and_counted(run_args, monkeypatch):
    def one_bad(instance, number, made=trajectory):
        item = made(instance, number)
        if instance in (0, 1) and number <= instance:
            item["messages"] = item["messages"][:1]
        return item

    monkeypatch.setitem(globals(), "trajectory", one_bad)

    async def body(manager, buffer, args, engine):
        return await manager.generate(0)

    result = with_server(run_args, body)
    assert result.metrics["rollout/num_dropped_trajectories"] == 3
    assert result.batches[0].samples.num_samples == 5, "of one group nothing is left, of another one sample"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rollout-buffer-url localhost:1", ["must begin with http://"]),
        ("--min-batch-collection-ratio 0.5", ["--min-batch-collection-ratio", "without --rollout-buffer-url"]),
        (f"--rollout-function-path {ALSO}", ["needs --rollout-buffer-url"]),
        ("--rollout-buffer-url http://h:1 --partial-rollout", ["--partial-rollout", "the server there generates"]),
        ("--rollout-buffer-url http://h:1 --use-rollout-logprobs", ["without the engines' log-probs"]),
        ("--rollout-buffer-url http://h:1 --deterministic", ["--deterministic"]),
        ("--rollout-buffer-url http://h:1 --prompt-data a.jsonl@[0:5]", ["reads a file as a whole"]),
        ("--http-proxy http://p:1", ["no request leaves the run"]),
        ("--http-proxy p:1 --rm-url http://h:1", ["must begin with http://"]),
    ],
)
def test_what_does_not_go_together_is_refused(flags, words):
    with pytest.raises(ConfigError) as caught:
        parse(["--dry-run", "--num-layers", "2", "--device", "cpu", *flags.split()])
    assert all(word in str(caught.value) for word in words), caught.value


def test_requests_that_leave_the_run_go_through_the_proxy():
    seen = []

    async def through(request):
        seen.append(request.headers["Host"])
        return web.json_response({"success": False, "data": {}} if "buffer" in seen[-1] else 0.5)

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", through)
        async with serving(app) as proxy:
            reward = RemoteReward("http://reward.invalid/score", proxy=proxy)
            assert await reward.reward("p", "r", "l", {}) == 0.5
            server = TrajectoryServer("http://buffer.invalid", proxy=proxy)
            await server.start({})
            await reward.close()
            await server.close()

    asyncio.run(run())
    assert seen == ["reward.invalid", "buffer.invalid"]
