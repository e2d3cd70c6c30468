"""Evaluation alone, as a user runs it: sets of the command line and of a file, logged to Weights & Biases offline."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.e2e.running import run_training, write_sums

KEY = "s3cretkey123456789012345678901234567890ab"


@pytest.mark.timeout(300)
def test_the_ninth_command_without_training_scores_every_set_once(tmp_path, tiny_model_dir):
    aime, gsm8k = write_sums(tmp_path / "aime.jsonl", 5), write_sums(tmp_path / "gsm8k.jsonl", 6)
    (tmp_path / "rm.py").write_text(
        "async def custom_rm(args, sample, **kw):\n    return {'tokens': float(sample.response_length)}\n"
    )
    (tmp_path / "eval.yaml").write_text(
        f"""
        eval:
          defaults: {{max_response_len: 3, temperature: 0.7}}
          datasets:
            - {{name: lengths, path: "{gsm8k}@[1:4]", custom_rm_path: rm.py, reward_key: tokens}}
            - {{name: greedy, path: {gsm8k}, temperature: 0, n_samples_per_eval_prompt: 2}}
        """
    )
    wandb = importlib.util.find_spec("wandb") is not None
    ended = run_training(
        tmp_path,
        *("--hf-checkpoint", tiny_model_dir("qwen3"), "--num-rollout", 0, "--run-name", "run"),
        *("--eval-prompt-data", "aime", aime, "--eval-prompt-data", "gsm8k", gsm8k, "--n-samples-per-eval-prompt", 16),
        *("--eval-config", "eval.yaml", "--rollout-max-response-len", 6, "--wandb-key", KEY),
        *(("--use-wandb", "--wandb-mode", "offline") if wandb else ()),
    )
    assert ended.code == 0, ended.output
    run = tmp_path / "outputs/run"
    (line,) = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert line["step"] == 0 and {"eval/aime", "eval/gsm8k", "eval/lengths", "eval/greedy"} < set(line)
    assert [f"eval/{name}/pass@16" in line for name in ("aime", "gsm8k", "lengths", "greedy")] == [True] * 3 + [False]
    assert line["eval/lengths"] == line["eval/lengths/response_length"] <= 3 < line["eval/aime/response_length/max"]
    assert line["eval/greedy/pass@1"] == line["eval/greedy/pass@2"] == line["eval/greedy"]
    files = {path.name for path in (run / "rollouts").iterdir()}
    assert files == {f"eval_{name}_000000.parquet" for name in ("aime", "gsm8k", "lengths", "greedy")}
    assert f"held out   {line['eval/lengths']:.3f}   (lengths)  pass@1" in ended.output
    assert "trainer" not in (run / "log.txt").read_text(), "engines alone"
    assert len(list(run.glob("wandb/offline-run-*"))) == wandb
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
