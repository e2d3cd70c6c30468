"""PPO with a critic from the command line: two roles on the same slots, each with options of its own; resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.running import metrics_of, run_training, tiny_arguments, write_sums

pytestmark = pytest.mark.timeout(240)
ROLES = """
actor: {weight-decay: 0.0}
critic: {lr: 0.01, lr_warmup_iters: 3, lr-decay-iters: 8, clip_grad: 0.5}
"""


def _arguments(model: Path, directory: Path, num_rollout: int) -> list[object]:
    """Two steps a rollout; in the first rollout only the critic learns."""
    (directory / "roles.yaml").write_text(ROLES)
    return [
        *tiny_arguments(model, write_sums(directory / "data.jsonl", 6), estimator="ppo"),
        *("--num-rollout", num_rollout, "--num-steps-per-rollout", 2, "--deterministic", "--save-interval", 1),
        *("--num-critic-only-steps", 1, "--value-clip", 0.05, "--kl-coef", 0.05, "--gamma", 0.95, "--lambd", 0.9),
        *("--normalize-advantages", "--megatron-config-path", directory / "roles.yaml"),
    ]


def _weights(run_dir: Path, iteration: int, part: str) -> dict[str, bytes]:
    place = run_dir / f"checkpoints/iter_{iteration:07d}" / part
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*.distcp")}


def test_one_and_one_rollout_are_two_for_policy_and_critic(tmp_path, tiny_model_dir):
    model, straight, resumed = tiny_model_dir("qwen3"), tmp_path / "straight", tmp_path / "resumed"
    for directory, parts in ((straight, [2]), (resumed, [1, 2])):
        directory.mkdir()
        for row, num_rollout in enumerate(parts):
            start = ["--load", directory / "outputs/run/checkpoints"] if row else ["--run-name", "run"]
            ended = run_training(directory, *_arguments(model, directory, num_rollout), *start, timeout=100)
            assert ended.code == 0, ended.output
            assert "never read" not in ended.output
    first, second = straight / "outputs/run", resumed / "outputs/run"
    assert metrics_of(first) == metrics_of(second)
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
