"""On-policy distillation: the example brings a student nearer to its teacher, on its own samples and without any
reward; and it is the same whether the teacher is behind an engine or in the trainer.
"""

import pytest

from examples.on_policy_distillation.report import sentences
from tests.e2e.running import ROOT, metrics_of, run_example, run_training

RECIPE = ROOT / "examples/on_policy_distillation"
ROLLOUTS = ("--deterministic", "--num-rollout", 8)


@pytest.mark.timeout(400)
def test_the_example_lowers_the_kl_to_its_teacher_which_may_be_behind_an_engine_or_in_the_trainer(tmp_path):
    outputs = tmp_path / "outputs"
    printed = run_example("on_policy_distillation", outputs, "--teacher-hidden", 64, *ROLLOUTS, timeout=250)
    behind_engine = metrics_of(outputs / "distillation")
    kl = [line["train/opd_kl"] for line in behind_engine]
    assert kl[-1] < 0.3 * kl[0]
    assert f"KL to the teacher, first -> last rollout:   {kl[0]:.3f} -> {kl[-1]:.3f}" in printed
    first, last = (outputs / f"distillation/rollouts/{rollout:06d}.parquet" for rollout in (0, len(kl) - 1))
    assert sentences(last) > 0.9 > sentences(first)
    assert {line["rollout/raw_reward"] for line in behind_engine} == {0.0}

    data = outputs / "distillation-data"
    ended = run_training(
        tmp_path,
        *("--config", RECIPE / "config.yaml", "--opd-type", "megatron", *ROLLOUTS, "--run-name", "megatron"),
        *("--hf-checkpoint", data / "student", "--opd-teacher-load", data / "teacher"),
        *("--prompt-data", data / "prompts.jsonl", "--device", "cpu"),
    )
    assert ended.code == 0, ended.output
    in_trainer = metrics_of(outputs / "megatron")
    assert len(in_trainer) == len(behind_engine)
    for ours, theirs in zip(behind_engine, in_trainer, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
