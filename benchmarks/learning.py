"""Does each algorithm learn? A tiny random model is rewarded for digits, with each of them, from the command line on.

    python benchmarks/learning.py [grpo ppo sft …]

The reward is the share of an answer's characters that are digits. Each run is `train.py` in a process of its own, 30
or 40 rollouts of 64 answers with two optimizer steps each; a table shows the mean of the first three rollouts and that
of the last three. `opd` distils from another random model without any reward, and `sft` trains on texts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples.tiny_model import make_tiny_model  # noqa: E402

DEADLINE = 600.0
REWARD, KL, LOSS, VARIANCE = "rollout/raw_reward", "train/opd_kl", "train/loss", "train/explained_variance"


@dataclass(frozen=True)
class Case:
    """One run: its own options, and the metric that shows that it learns."""

    options: tuple[str, ...]
    metric: str = REWARD
    rollouts: int = 30
    learning_rate: float = 3e-3


def _estimator(name: str, *options: str) -> Case:
    return Case(("--advantage-estimator", name, *options))


CASES = {
    "grpo": _estimator("grpo"),
    "gspo": _estimator("gspo", "--eps-clip", "0.02", "--eps-clip-high", "0.03"),
    "cispo": _estimator("cispo"),
    "gmpo": _estimator("grpo", "--policy-loss", "gmpo"),
    "sapo": _estimator("grpo", "--policy-loss", "sapo"),
    "rloo": _estimator("rloo"),
    "reinforce_plus_plus": _estimator("reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": _estimator("reinforce_plus_plus_baseline"),
    "ppo": Case(
        ("--advantage-estimator", "ppo", "--megatron-config-path", "roles.yaml", "--normalize-advantages")
        + ("--lambd", "0.95", "--value-clip", "1"),
        rollouts=40,
        learning_rate=1e-3,
    ),
    "opd": Case(("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "teacher"), KL),
    "sft": Case(("--loss-type", "sft_loss", "--input-key", "messages"), LOSS),
}
ALSO = {"ppo": (VARIANCE,)}
"""What else is shown of a run."""


def reward_func(args, sample, **kwargs) -> float:
    """The share of the answer's characters that are digits; without a reward for distillation."""
    if args.use_opd:
        return 0.0
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)


def write_task(directory: Path) -> None:
    """The model, a teacher, 81 prompts, 8 conversations, and the options of the critic."""
    for seed, name in enumerate(("model", "teacher")):
        make_tiny_model(directory / name, vocab=300, layers=1, seed=seed)
    sums = [(f"What is {a} + {b}?", str(a + b)) for a in range(1, 10) for b in range(1, 10)]
    _write(directory / "prompts.jsonl", [{"prompt": question, "label": answer} for question, answer in sums])
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {answer}."}]
        for question, answer in sums[:8]
    ]
    (directory / "roles.yaml").write_text("critic: {lr: 3.0e-3, clip_grad: 0}\n")
    _write(directory / "chats.jsonl", [{"messages": messages} for messages in chats])


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(directory: Path, name: str) -> tuple[list[dict], float]:
    """The metrics of a run, a record a rollout, and its seconds."""
    case = CASES[name]
    data = "chats.jsonl" if case.metric == LOSS else "prompts.jsonl"
    command = [
        *(sys.executable, str(ROOT / "train.py"), "--hf-checkpoint", "model", "--prompt-data", data),
        *("--custom-rm-path", f"{Path(__file__).resolve()}:reward_func", "--rollout-max-response-len", "8"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "1" if case.metric == LOSS else "8"),
        *("--num-rollout", str(case.rollouts), "--num-steps-per-rollout", "2", "--lr", str(case.learning_rate)),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--run-name", name, *case.options),
    ]
    start = time.perf_counter()
    with (directory / f"{name}.txt").open("w") as output:
        ended = subprocess.run(command, cwd=directory, stdout=output, stderr=output, timeout=DEADLINE)
    if ended.returncode:
        raise SystemExit(f"{name} ended with {ended.returncode}:\n{(directory / f'{name}.txt').read_text()[-3000:]}")
    lines = (directory / "outputs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], time.perf_counter() - start


def first_and_last(records: list[dict], metric: str) -> tuple[float, float]:
    """The mean of the first three records that have a metric, and that of the last three."""
    values = [record[metric] for record in records if metric in record]
    return sum(values[:3]) / len(values[:3]), sum(values[-3:]) / len(values[-3:])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)} (default: all)")
    names = parser.parse_args().names or list(CASES)
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as place:
        write_task(Path(place))
        print(f"{'algorithm':<30}{'metric':<28}{'first':>8}{'last':>8}{'seconds':>9}")
        for name in names:
            records, seconds = run(Path(place), name)
            for metric in (CASES[name].metric, *ALSO.get(name, ())):
                first, last = first_and_last(records, metric)
                print(f"{name:<30}{metric:<28}{first:>8.3f}{last:>8.3f}{seconds:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
