"""PPO with a critic from the command line: the example in its smallest form; resumed, it is the same run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.running import metrics_of, run_example

pytestmark = pytest.mark.timeout(300)
ROLES = """
actor: {weight-decay: 0.0}
critic: {lr: 0.01, lr_warmup_iters: 3, lr-decay-iters: 8, clip_grad: 0.5}
"""


def _run(outputs: Path, *options: object) -> str:
    """Two rollouts of two steps; in the first one only the critic learns. Returns the output."""
    roles = outputs.parent / "roles.yaml"
    roles.write_text(ROLES)
    return run_example(
        *("ppo_critic", outputs, "--num-rollout", 2, "--rollout-batch-size", 16, "--deterministic"),
        *("--save-interval", 1, "--megatron-config-path", roles, "--value-clip", 0.05, "--kl-coef", 0.05),
        *("--gamma", 0.95, *options),
        timeout=140,
    )


def _weights(run_dir: Path, iteration: int, part: str) -> dict[str, bytes]:
    place = run_dir / f"checkpoints/iter_{iteration:07d}" / part
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*.distcp")}


def test_the_example_says_what_both_learned_and_resumed_it_is_the_same_run(tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    output = _run(straight)
    assert "never read" not in output
    for shown in ("mean reward", "explained variance of the returns by the critic", "value loss"):
        assert shown in output
    _run(resumed, "--load", straight / "ppo-critic/checkpoints", "--ckpt-step", 0)
    first, second = straight / "ppo-critic", resumed / "ppo-critic"
    assert metrics_of(first)[1:] == metrics_of(second)
    for part in ("trainer", "critic"):
        assert _weights(first, 1, part) and _weights(first, 1, part) == _weights(second, 1, part)
    _check_metrics(metrics_of(first))


def _check_metrics(lines: list[dict]) -> None:
    warming_up, both = lines
    assert "train/pg_loss" not in warming_up and both["train/grad_norm"] > 0
    assert warming_up["train/step_0/explained_variance"] == pytest.approx(0.0, abs=1e-9), "values start at 0"
    for line in lines:
        assert line["train/value_loss"] > 0 and line["train/critic_grad_norm"] > 0
        assert 0 <= line["train/value_clipfrac"] <= 1
    rates = [line[f"train/step_{index}/critic_lr"] for line in lines for index in range(2)]
    assert rates == pytest.approx([0.0, 0.01 / 3, 0.02 / 3, 0.01])
    assert both["train/lr"] == pytest.approx(1e-3)
