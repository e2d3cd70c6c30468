"""The rollout manager against real parts: embedded engine, router, HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from colloid.config import parse
from colloid.engines.fleet import Fleet
from colloid.engines.launch import launch_engine
from colloid.errors import EngineError
from colloid.rollout.actor import RolloutActor
from colloid.rollout.manager import RolloutManager
from colloid.rollout.servers import fleet_config

FLAGS = [
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "20"),
    *("--num-rollout", "2", "--rm-type", "random", "--deterministic", "--over-sampling-batch-size", "6"),
    *("--dynamic-sampling-filter-path", "colloid.rollout.filters.check_reward_nonzero_std"),
]


def options(model, directory):
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"What is {i} + 1?", "label": str(i + 1)}) + "\n" for i in range(9)))
    paths = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--outputs-dir", str(directory)]
    return parse([*paths, "--eval-prompt-data", "nine", str(data), *FLAGS], "train")


@pytest.fixture(scope="module")
def args(tiny_model_dir, tmp_path_factory):
    return options(tiny_model_dir(), tmp_path_factory.mktemp("rollout"))


@pytest.fixture(scope="module")
def fleet(args):
    Path(args.run_dir).mkdir(parents=True, exist_ok=True)
    fleet = Fleet(fleet_config(args, "key of the run"))
    fleet.start()
    yield fleet
    fleet.stop()


def two_rollouts(args, fleet):
    async def run():
        manager = RolloutManager(args)
        await manager.start(fleet.router_url, [address.url for address in fleet.addresses], "key of the run")
        try:
            results = [await manager.generate(rollout_id, 0) for rollout_id in range(2)]
            return results, await manager.evaluate(2)
        finally:
            await manager.close()

    return asyncio.run(run())


def test_two_deterministic_runs_are_the_same_bit_by_bit(args, fleet):
    (first, first_eval), (second, second_eval) = two_rollouts(args, fleet), two_rollouts(args, fleet)
    for one, other in zip(first, second, strict=True):
        for name, values in vars(one.batches[0].samples).items():
            np.testing.assert_array_equal(values, getattr(other.batches[0].samples, name), err_msg=name)
    assert first_eval["eval/nine"] == second_eval["eval/nine"]
    files = sorted(path.name for path in Path(args.run_dir, "rollouts").iterdir())
    assert files == ["000000.parquet", "000001.parquet", "eval_nine_000002.parquet"]


def test_the_engine_reports_a_log_prob_and_a_version_for_every_token(args, fleet, monkeypatch):
    shutil.rmtree(Path(args.run_dir, "rollouts"), ignore_errors=True)
    monkeypatch.setattr(args, "save_rollouts", False)
    results, _ = two_rollouts(args, fleet)
    assert not Path(args.run_dir, "rollouts").exists(), "--no-save-rollouts"
    for result in results:
        columns = result.batches[0].samples
        assert columns.num_samples == 16
        assert (columns.rollout_log_probs < 0).all()
        assert (columns.weight_versions == columns.weight_versions[0]).all()
        assert len({tuple(row) for row in np.split(columns.tokens, columns.offsets[1:-1])}) > 8


@pytest.mark.timeout(300)
def test_a_rollout_that_fails_as_its_engine_has_ended_says_which_and_how(tiny_model_dir, tmp_path):
    async def run():
        actor = RolloutActor(options(tiny_model_dir(), tmp_path))
        actor.load_data()
        try:
            access = await actor.start(2, None, launch_engine)
            os.kill(access.pids[0], signal.SIGKILL)
            with pytest.raises(EngineError, match=rf"engine {access.addresses[0].url} .*ended with -9; .*engine_0.log"):
                await actor.generate(0, 0, -1, None)
        finally:
            await actor.close()

    asyncio.run(run())
