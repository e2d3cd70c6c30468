"""How much of generation and training overlaps in asynchronous training, beside synchronous training in the same run.

    python benchmarks/async_overlap.py [--blocks 3] [--steps 6] [--prompts 16] [--repeats 20] [--response 64]

One engine on one core, one trainer rank on another, a small random model. Blocks of synchronous and of asynchronous
steps (one rollout ahead) alternate in one run, so that both see the same machine. Sizes are to be such that generation
and training take about as long: the table says what they take (a longer prompt, --repeats, makes training longer, as
the engine computes a group's prompt once). Efficiency is max(generation, training) / step, of the sums over all steps:
1 where all else is hidden. Of each asynchronous block the first step, which waits for its rollout, is left out, and the
last one, beside which nothing is generated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from colloid.cluster.run import Run  # noqa: E402
from colloid.config import parse  # noqa: E402
from colloid.loop import Clock, RolloutsAhead  # noqa: E402
from colloid.observe.logs import setup_logging  # noqa: E402
from examples.tiny_model import make_tiny_model  # noqa: E402

GENERATION, TRAINING, UPDATE, STEP = (
    "perf/rollout_time",
    "perf/train_time",
    "perf/update_weights_time",
    "perf/step_time",
)


def reward_func(args, sample, **kwargs) -> float:
    """The share of the answer's characters that are digits."""
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)


def parsed(directory: Path, options: argparse.Namespace) -> object:
    """The run's options; makes its model and data."""
    make_tiny_model(directory / "model", vocab=512, layers=2, hidden=options.hidden)
    sums = [(a, b) for a in range(1, 20) for b in range(1, 20)]
    rows = [{"prompt": f"What is {a} + {b}? " * options.repeats, "label": str(a + b)} for a, b in sums]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    total = 2 * options.blocks * options.steps + 1
    words = [
        *("--hf-checkpoint", directory / "model", "--prompt-data", directory / "prompts.jsonl"),
        *("--custom-rm-path", f"{Path(__file__).resolve()}:reward_func", "--num-rollout", total),
        *("--rollout-batch-size", options.prompts, "--n-samples-per-prompt", 8, "--num-steps-per-rollout", 2),
        *("--rollout-max-response-len", options.response, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096),
        *("--advantage-estimator", "grpo", "--outputs-dir", directory / "outputs", "--no-save-rollouts"),
    ]
    return parse([str(word) for word in words], "train_async")


def pin(run: Run) -> None:
    """The engine on the first core, the trainer on the second; what else runs goes where there is room."""
    import ray

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    trainer = ray.get(run._workers[0].__ray_call__.remote(lambda worker: os.getpid()))
    for core, pids in ((cores[0], run._engines.pids[:1]), (cores[1], [trainer])):
        for pid in pids:
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {core})


def step(run: Run, rollout_id: int, get_rollout) -> dict[str, float]:
    """One step: the rollout, training, the weight update; its times."""
    clock = Clock()
    with clock("rollout_wait_time"):
        rollout = get_rollout()
    with clock("train_time"):
        metrics = run.train(rollout_id, rollout)
    with clock("update_weights_time"):
        metrics |= run.sync_weights()
    return rollout.metrics | metrics | clock.metrics(rollout.num_tokens)


def measure(run: Run, args: object, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Times of all steps, by kind."""
    run.sync_weights()
    next_id = 0
    step(run, next_id, lambda: run.generate(0))  # everything is warm after it
    next_id += 1
    found: dict[str, list[dict[str, float]]] = {"sync": [], "async": []}
    for _ in range(options.blocks):
        for _ in range(options.steps):
            current = next_id
            found["sync"].append(step(run, current, lambda: run.generate(current)))  # noqa: B023 (called at once)
            next_id += 1
        end = next_id + options.steps
        ahead = RolloutsAhead(run, SimpleNamespace(**{**args.as_dict(), "num_rollout": end}))
        for current in range(next_id, end):
            ahead.start(current)
            times = step(run, current, lambda: ahead.take(current))  # noqa: B023
            if next_id < current < end - 1:  # the first one waits for its rollout, beside the last one runs nothing
                found["async"].append(times)
        next_id = end
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("blocks", 3),
        ("steps", 6),
        ("prompts", 16),
        ("repeats", 20),
        ("response", 64),
        ("hidden", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        args = parsed(Path(place), options)
        setup_logging(args.run_dir, "driver")
        with Run(args) as run:
            pin(run)
            found = measure(run, args, options)
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; seconds, medians of the steps")
    print(f"{'':<7}{'steps':>6}{'generate':>10}{'train':>8}{'update':>8}{'step':>8}{'efficiency':>12}")
    for kind, times in found.items():
        median = {name: statistics.median(one[name] for one in times) for name in (GENERATION, TRAINING, UPDATE, STEP)}
        total = {name: sum(one[name] for one in times) for name in (GENERATION, TRAINING, STEP)}
        efficiency = max(total[GENERATION], total[TRAINING]) / total[STEP]
        numbers = f"{median[GENERATION]:>10.2f}{median[TRAINING]:>8.2f}{median[UPDATE]:>8.2f}{median[STEP]:>8.2f}"
        print(f"{kind:<7}{len(times):>6}{numbers}{efficiency:>12.2f}")


if __name__ == "__main__":
    main()
