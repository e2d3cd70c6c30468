"""Examples from the command of their README, in their smallest form, on a CPU."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet
import pytest

from colloid.observe.metrics import read_metrics
from tests.e2e.running import metrics_of, run_example

pytestmark = pytest.mark.timeout(400)
SMALL = ("--rollout-batch-size", 4, "--n-samples-per-prompt", 4)


def run_quietly(name: str, outputs: Path, *options: object, timeout: float = 350, **environment: str) -> str:
    """What an example printed, which has no complaint of options in it."""
    printed = run_example(name, outputs, *options, timeout=timeout, **environment)
    assert "never read" not in printed
    return printed


def shown(printed: str, label: str) -> tuple[float, float]:
    """First and last value of a line of a report."""
    first, last = re.search(rf"^{re.escape(label)}\s+(\S+) -> (\S+)$", printed, re.MULTILINE).groups()
    return float(first.rstrip("%")), float(last.rstrip("%"))


def stored(run_dir: Path, rollout: int) -> list[dict]:
    return pyarrow.parquet.read_table(run_dir / f"rollouts/{rollout:06d}.parquet").to_pylist()


def test_a_solver_and_a_critic_are_trained_together_as_siblings(tmp_path):
    printed = run_quietly("multi_agent", tmp_path / "outputs", "--num-rollout", 2, *SMALL)
    assert 20 <= shown(printed, "the solver gives a number")[0] <= 80
    assert shown(printed, "the critic gives the right sentence")[0] < 100
    rows = stored(tmp_path / "outputs/multi-agent", 0)
    assert len(rows) == 32
    pairs: dict[int, list[dict]] = {}
    for row in rows:
        pairs.setdefault(row["index"], []).append(row)
    assert {len(pair) for pair in pairs.values()} == {2}, "a sample of each role, in one rollout"
    assert all(one["reward"] == other["reward"] for one, other in pairs.values())
    for line in metrics_of(tmp_path / "outputs/multi-agent"):
        assert line.get("train/train_rollout_logprob_abs_diff", 0.0) < 1e-4 and line["rollout/num_failed_samples"] == 0


def test_a_reward_model_prefers_sentences_and_is_what_the_policy_is_trained_on(tmp_path):
    printed = run_quietly("custom_reward_model", tmp_path / "outputs", "--num-rollout", 2, *SMALL)
    assert 0 < shown(printed, "mean reward")[0] < 1
    rows = stored(tmp_path / "outputs/custom-reward-model", 0)
    scores = {
        whole: [row["reward"] for row in rows if is_sentence(row["response"]) == whole] for whole in (True, False)
    }
    means = {whole: sum(found) / len(found) for whole, found in scores.items()}
    assert means[True] > means[False] + 0.2
    assert {line["rollout/num_failed_samples"] for line in metrics_of(tmp_path / "outputs/custom-reward-model")} == {0}


def is_sentence(text: str) -> bool:
    return re.fullmatch(r"The answer is \d+\.", text) is not None


def test_each_evaluation_set_has_its_own_sampling_and_grader(tmp_path):
    printed = run_quietly("eval_multi_task", tmp_path / "outputs", "--num-rollout", 2, *SMALL)
    for name in ("sums", "sums/pass@8", "sums_greedy", "sentences", "choices"):
        assert all(0 <= value <= 1 for value in shown(printed, name))
    before, *_, after = (line for line in metrics_of(tmp_path / "outputs/eval-multi-task") if "eval/sums" in line)
    assert 0 < before["eval/sums"] < 1 and "eval/sums/pass@8" in before and "eval/choices/pass@4" in before
    assert "eval/sums_greedy/pass@1" not in before and "eval/sums/pass@8" in after


@pytest.mark.skipif(not find_spec("reasoning_gym"), reason="needs reasoning-gym: pip install -e '.[examples]'")
def test_problems_of_reasoning_gym_are_graded_by_its_verifier(tmp_path):
    outputs = tmp_path / "outputs"
    printed = run_quietly("gsm_symbolic", outputs, "--num-rollout", 2, *SMALL)
    assert all(0 <= value <= 1 for value in shown(printed, "on held-out problems"))
    rows = stored(outputs / "gsm-symbolic", 0)
    worth = {json.loads(row["metadata"])["entry"]["answer"] == row["response"]: row["reward"] for row in rows}
    assert set(worth) <= {True, False} and all(row["reward"] in (0.0, 0.01, 1.0) for row in rows)
    check_verifier(outputs)


def check_verifier(outputs: Path) -> None:
    import asyncio

    from colloid import Sample
    from examples.gsm_symbolic.reward import reward_func

    row = json.loads((outputs / "gsm-symbolic-data/train.jsonl").read_text().splitlines()[0])
    right = row["label"]
    for response, reward in [
        (f"So <answer>{right}</answer>", 1.0),
        (right, 1.0),
        (f"<answer>{right}</answer> no, <answer>{int(right) + 1}</answer>", 0.01),
        ("no idea", 0.0),
    ]:
        assert asyncio.run(reward_func(None, Sample(response=response, metadata=row["metadata"]))) == reward


def test_after_fine_tuning_the_engine_says_what_was_taught(tmp_path):
    printed = run_quietly("sft", tmp_path / "outputs")
    first, last = shown(printed, "loss")
    assert last < 0.1 * first
    assert shown(printed, "says what it was taught") == (0.0, 1.0)


def test_an_engine_in_bfloat16_is_further_from_the_trainer_and_is_corrected(tmp_path):
    run_quietly("train_infer_mismatch", tmp_path / "outputs", "--num-rollout", 2, *SMALL, RUNS="float32 bfloat16-tis")
    for exact, rounded in zip(
        *(metrics_of(tmp_path / f"outputs/mismatch-{run}") for run in ("float32", "bfloat16-tis")), strict=True
    ):
        assert (
            exact["train/train_rollout_logprob_abs_diff"]
            < 1e-4
            < 1e-3
            < rounded["train/train_rollout_logprob_abs_diff"]
        )
        assert abs(exact["train/mismatch_k3_kl"]) < 1e-6 < rounded["train/mismatch_k3_kl"]
        assert 0.5 < rounded["train/mismatch_ratio"] < 2 and "train/tis" in rounded and "train/tis" not in exact


@pytest.mark.timeout(900)
def test_a_run_whose_engine_router_and_trainer_are_killed_is_the_undisturbed_run(tmp_path):
    sizes = ("--num-rollout", 8, "--rollout-batch-size", 2, "--n-samples-per-prompt", 2)
    printed = run_quietly("fault_tolerance", tmp_path / "outputs", *sizes, timeout=700)
    assert printed.rstrip().endswith("no difference")
    kills = (tmp_path / "outputs/fault-tolerance/kills.jsonl").read_text().splitlines()
    assert [json.loads(line)["who"] for line in kills] == ["engine", "router", "trainer rank"]
    assert "trainer rank 0 (pid" in (tmp_path / "outputs/fault-tolerance/restarts.jsonl").read_text()


def test_engines_that_run_already_join_and_leave_and_no_sample_is_lost(tmp_path):
    sizes = (*SMALL, "--rollout-max-response-len", 16, "--num-rollout", 80)  # time for an engine to come and to go
    printed = run_quietly("external_engines", tmp_path / "outputs", *sizes)
    assert "1280 samples: 0 lost, 0 doubled, 0 without a response" in printed
    assert "joined 1, left 1, failed samples 0" in printed
    alive = [line["engine/alive"] for line in read_metrics(tmp_path / "outputs/external-engines")]
    assert alive[0] == 1 and 2 in alive and alive[-1] == 1
