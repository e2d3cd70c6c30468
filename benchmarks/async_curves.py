"""Does a task learn as well asynchronously? Curves of the reward side by side, sync and async.

    python benchmarks/async_curves.py [NAME …]          a tiny random model that is rewarded for digits: a minute a run
    python benchmarks/async_curves.py --quickstart      the quick start's task and model: some minutes a run

Each run is a process of its own, one after another, with the same seed and options; the table shows the mean reward of
each tenth of the rollouts, and seconds a step (the median).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning import write_task  # noqa: E402

DEADLINE = 3600.0
CONTINUOUS = ("--rollout-function-path", "colloid.rollout.continuous.generate_rollout", "--max-staleness", "3")
CASES = {
    "sync": (),
    "one-off": ("--async-buffer-size", "1"),
    "one-off-tis": ("--async-buffer-size", "1", "--use-tis"),
    "ahead-4-2": ("--async-buffer-size", "4", "--update-weights-interval", "2"),
    "ahead-4-2-tis": ("--async-buffer-size", "4", "--update-weights-interval", "2", "--use-tis"),
    "continuous": CONTINUOUS,
    "continuous-tis": (*CONTINUOUS, "--use-tis"),
}
TENTHS = 10


def digits(rollouts: int) -> tuple[str, ...]:
    """Options of the task of `benchmarks/learning.py`."""
    return (
        *("--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", "--advantage-estimator", "grpo"),
        *("--custom-rm-path", f"{ROOT}/benchmarks/learning.py:reward_func", "--rollout-max-response-len", "8"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--num-steps-per-rollout", "2", "--lr", "3e-3"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--num-rollout", str(rollouts)),
    )


def quickstart(model: str, rollouts: int | None) -> tuple[str, ...]:
    """Options of the quick start; its data is there after `scripts/quickstart.sh`, or its first steps."""
    length = () if rollouts is None else ("--num-rollout", str(rollouts))
    return ("--config", str(ROOT / "examples/quickstart/config.yaml"), "--hf-checkpoint", model, *length)


def run(directory: Path, name: str, options: tuple[str, ...], outputs: Path) -> list[dict]:
    """The metrics of a run, a record a rollout."""
    entry = "train.py" if name == "sync" else "train_async.py"
    command = [sys.executable, str(ROOT / entry), *options, "--outputs-dir", str(outputs), "--run-name", name]
    start = time.perf_counter()
    with (outputs / f"{name}.txt").open("w") as output:
        ended = subprocess.run([*command, *CASES[name]], cwd=directory, stdout=output, stderr=output, timeout=DEADLINE)
    if ended.returncode:
        raise SystemExit(f"{name} ended with {ended.returncode}:\n{(outputs / f'{name}.txt').read_text()[-3000:]}")
    records = [json.loads(line) for line in (outputs / name / "metrics.jsonl").read_text().splitlines()]
    print(row(name, records, time.perf_counter() - start), flush=True)
    return records


def row(name: str, records: list[dict], seconds: float) -> str:
    """Reward by tenth, staleness, times."""
    rewards = [record["rollout/raw_reward"] for record in records if "rollout/raw_reward" in record]
    bounds = [len(rewards) * tenth // TENTHS for tenth in range(TENTHS + 1)]
    means = [statistics.mean(rewards[low:high]) for low, high in zip(bounds, bounds[1:], strict=False) if high > low]
    oldest = max(record.get("staleness/max", 0.0) for record in records)
    step = statistics.median(record["perf/step_time"] for record in records if "perf/step_time" in record)
    return f"{name:<16}" + "".join(f"{mean:>7.3f}" for mean in means) + f"{oldest:>7.0f}{step:>8.2f}{seconds:>8.0f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--quickstart", action="store_true", help="the quick start's task, sync and one-off")
    parser.add_argument("--model", default=str(Path.home() / ".cache/colloid/smollm2-135M-instruct"), help="for it")
    parser.add_argument("--num-rollout", type=int, default=None, help="default: 40, or the quick start's own")
    options = parser.parse_args()
    names = options.names or (["sync", "one-off"] if options.quickstart else list(CASES))
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as place:
        if options.quickstart:
            directory, words = ROOT, quickstart(options.model, options.num_rollout)
            data = "outputs/quickstart-data"
            subprocess.run([sys.executable, "examples/quickstart/make_task.py", "--output", data], cwd=ROOT, check=True)
        else:
            directory, words = Path(place), digits(options.num_rollout or 40)
            write_task(directory)
        head = "".join(f"{f'{tenth * 100 // TENTHS}%':>7}" for tenth in range(1, TENTHS + 1))
        print(f"{'mean reward until':<16}{head}{'oldest':>7}{'s/step':>8}{'seconds':>8}")
        for name in names:
            run(directory, name, words, Path(place))


if __name__ == "__main__":
    main()
