"""Optimizer steps on one rank and on two, whole or distributed optimizer; the steps in which nothing is to be learned;
updates of engines.
"""

from __future__ import annotations

import copy
import fcntl
from pathlib import Path

import numpy as np
import pytest
import torch

from colloid.engines.checksums import tensor_checksum as checksum
from tests.parallel.rollouts import TEMPERATURE, hf_loss, hf_model, make_rollout


def difference(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    return max(np.abs(found[name] - wanted[name]).max() for name in wanted)


def test_weights_after_two_rollouts_do_not_depend_on_ranks_or_optimizer(one_rank, two_ranks):
    wanted = one_rank["training"]["micro 1"]
    others = [one_rank["training"]["micro 4"], *(two_ranks[0]["training"][x] for x in ("whole", "distributed"))]
    for found in (*others, two_ranks[0]["training"]["overlapped"]):
        assert found["same"]
        assert difference(found["weights"], wanted["weights"]) < 1e-5
        for metrics, reference in zip(found["metrics"], wanted["metrics"], strict=True):
            timeless = {name: value for name, value in reference.items() if "perf/" not in name}
            assert {name: metrics[name] for name in timeless} == pytest.approx(timeless, rel=1e-4, abs=1e-5)


def test_weights_are_those_of_a_plain_training_loop(models, one_rank):
    policy = hf_model(models["qwen3"])
    adam = torch.optim.Adam(policy.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-4)
    for rollout in range(2):
        batch, old = make_rollout(rollout, num_steps=2), copy.deepcopy(policy)
        for step in range(2):
            adam.zero_grad()
            hf_loss(policy, batch, step=step, old=old).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            adam.step()
    found = one_rank["training"]["no decay"]["weights"]
    assert difference(found, {name: p.detach().numpy() for name, p in policy.named_parameters()}) < 5e-6


def test_bf16_trains_close_to_float32(one_rank, two_ranks):
    wanted = one_rank["training"]["micro 1"]
    for found in (one_rank["training"]["bf16"], two_ranks[0]["training"]["bf16"]):
        assert 0 < difference(found["weights"], wanted["weights"]) < 0.02
        assert found["metrics"][0]["train/loss"] == pytest.approx(wanted["metrics"][0]["train/loss"], abs=0.02)
        assert found["metrics"][0]["train/step_0/ppo_kl"] == 0.0


def test_first_step_of_a_rollout_is_on_policy_and_the_second_is_not(one_rank):
    for metrics in one_rank["training"]["micro 4"]["metrics"]:
        assert metrics["train/step_0/ppo_kl"] == 0.0
        assert abs(metrics["train/step_1/ppo_kl"]) > 1e-6
        steps = [metrics[f"train/step_{step}/loss"] for step in range(2)]
        assert metrics["train/loss"] == pytest.approx(sum(steps) / 2)


def test_step_without_any_gradient_still_decays_and_schedules(one_rank, two_ranks):
    for result in (one_rank["empty_step"], *(rank["empty_step"] for rank in two_ranks)):
        assert result["metrics"]["train/step_0/grad_norm"] == 0.0
        assert result["metrics"]["train/step_1/grad_norm"] > 0
        assert "train/step_0/loss" not in result["metrics"]
        # 16 steps in all, linearly to 0.
        assert result["metrics"]["train/step_1/lr"] == pytest.approx(1e-2 * 15 / 16)
        assert result["idle"]["train/grad_norm"] == 0.0
        assert result["idle"]["train/lr"] == pytest.approx(1e-2 * 13.5 / 16)
    assert difference(two_ranks[0]["empty_step"]["after"], one_rank["empty_step"]["after"]) < 1e-5


def test_a_metric_that_only_one_rank_has_measured_is_the_same_on_all(one_rank, two_ranks):
    wanted = one_rank["uneven"]
    assert wanted["train/train_rollout_logprob_abs_diff"] > 0
    for metrics in (rank["uneven"] for rank in two_ranks):
        timeless = {name: value for name, value in wanted.items() if "perf/" not in name}
        assert {name: metrics.get(name) for name in timeless} == pytest.approx(timeless, rel=1e-4, abs=1e-6)


def test_infinite_reward_is_an_error_that_names_rollout_and_step(one_rank, two_ranks):
    for message in (one_rank["non_finite"], *(rank["non_finite"] for rank in two_ranks)):
        assert message.startswith("NonFiniteError: the loss is")
        assert "optimizer step 1 of rollout 7" in message


def test_engines_get_every_tensor_in_bounded_buckets(two_ranks, engines):
    update = two_ranks[0]["update"]
    assert [metrics["weight_version"] for metrics in update["metrics"]] == [1.0, 2.0, 3.0]
    for engine in engines[:2]:
        assert engine.problems == []
        assert not engine.paused
        assert {name: checksum(tensor) for name, tensor in engine.updates[-1].items()} == update["checksums"]
        sizes = [call["shared_memory"]["size"] for path, call in engine.calls if path == "/update_weights_from_tensor"]
        assert len(sizes) > 10
        assert max(size for size in sizes if size != 512 * 64 * 4) <= 100_000


def test_failed_update_names_the_engine_and_leaves_none_paused(two_ranks, engines):
    good, _, broken = engines
    for rank in two_ranks:
        message = rank["update"]["error"]
        assert message.startswith("WeightSyncError")
        assert "version 3" in message and "1 of 3 engines failed" in message
        assert broken.url in message and "out of memory" in message
    assert not broken.paused and broken.calls[-1][0] == "/continue_generation"
    # The failed version was taken up by none: the next update has its number.
    ends = [call for path, call in good.calls if path == "/end_weight_update"]
    assert ends.count({}) == 1, "that of what had been begun"
    versions = [call["weight_version"] for call in ends if call]
    assert versions == ["1", "2", "3"]


def test_real_engine_holds_the_trainers_weights_and_agrees_on_log_probs(one_rank):
    sync = one_rank["sync"]
    assert sync["engine"] == sync["trainer"]
    assert sync["trainer"][0] != sync["trainer"][2]
    for metrics in sync["metrics"]:
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
    # Also at this temperature, as a teacher.
    assert max(map(abs, sync["judged"])) < 1e-5 and TEMPERATURE != 1


def test_no_shared_memory_is_left_behind(two_ranks):
    assert [path for path in Path("/dev/shm").glob("colloid-weights-*") if not has_owner(path)] == []


def has_owner(path: Path) -> bool:
    """Whether a living process, of whatever run, holds the lock of the file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_process_without_cuda_stays_an_ordinary_one(one_rank):
    found = one_rank["process"]
    assert not found["cuda"]
    assert found["on cuda"] == "cpu"
    assert found["on meta"] == {"meta"}
    assert found["AdamW"] < 1e-6 and found["Adam"] < 1e-6
