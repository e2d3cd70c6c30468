"""What a run came to, as text for its end: rewards, held-out scores, where the time went, where the outputs are.

Read from the run directory alone, so that it can be had at any time: `python -m colloid.observe.summary outputs/NAME`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colloid.observe.metrics import METRICS_FILE, read_metrics
from colloid.observe.progress import duration

REWARD = "rollout/raw_reward"
LOSS = "train/loss"
"""Stands in where there are no rewards (SFT)."""
WINDOW = 3
"""Rollouts that the first and the last reward are a mean of: a single rollout's reward is noisy."""

TIMES = (
    ("generation", "perf/rollout_time"),
    ("training", "perf/train_time"),
    ("weight sync", "perf/update_weights_time"),
    ("offloading", "perf/offload_time"),
    ("checkpoints", "perf/save_time"),
    ("evaluation", "perf/eval_time"),
)
"""The parts of a run's time: label, metric. What they leave of it is shown as the rest."""

WHOLE = ("perf/step_time", "perf/eval_time")
"""What they are parts of: evaluation is no part of a step."""

OUTPUTS = (
    (METRICS_FILE, "one line a step"),
    ("rollouts", "the samples, one Parquet file a rollout"),
    ("wandb", "what W&B keeps of the run"),
    ("checkpoints", "model, optimizer and data state"),
    ("profiles", "traces of training, for ui.perfetto.dev"),
    ("memory", "recorded allocations, for memray or docs.pytorch.org/memory_viz"),
    ("args.yaml", "every option as it was resolved"),
    ("log.txt", "what the processes logged"),
    ("engines", "logs of engines and router"),
)


def summary(run_dir: str | Path) -> str:
    """Several lines of text; works for a run of any length, an unfinished one too."""
    run_dir = Path(run_dir)
    records = read_metrics(run_dir)
    if not records:
        return f"No metrics in {run_dir}: nothing was trained or evaluated yet."
    sections = [_progress_lines(records), _time_lines(records), _output_lines(run_dir)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def reward_before_after(records: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Mean reward of the first and of the last three rollouts (fewer if there are fewer); None without any."""
    rewards = _values(records, REWARD)
    if not rewards:
        return None
    return _mean(rewards[:WINDOW]), _mean(rewards[-WINDOW:])


def eval_before_after(records: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """First and last score of each evaluation set, by its name (`eval/<name>`; longer names are its details)."""
    names = dict.fromkeys(
        key for record in records for key in record if key.startswith("eval/") and key.count("/") == 1
    )
    values = {name.removeprefix("eval/"): _values(records, name) for name in names}
    return {name: (scores[0], scores[-1]) for name, scores in values.items() if scores}


def time_by_part(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds by part, summed over the run; the parts that took none are left out.

    Where parts overlap (asynchronous training) they may sum to more than the whole: then there is no rest.
    """
    parts = {label: sum(_values(records, name)) for label, name in TIMES}
    parts["rest"] = max(0.0, _whole(records) - sum(parts.values()))
    return {label: seconds for label, seconds in parts.items() if seconds > 0}


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line of text, from the least value to the greatest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    blocks = "▁▂▃▄▅▆▇█"
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)


def _progress_lines(records: list[dict[str, Any]]) -> list[str]:
    rewards = _values(records, REWARD)
    lines = []
    if (ends := reward_before_after(records)) is not None:
        count = min(WINDOW, len(rewards))
        what = f"mean of the first and last {count} of {len(rewards)} rollouts"
        lines.append(f"reward     {ends[0]:.3f} -> {ends[1]:.3f}   ({what})")
        lines.append(f"           {sparkline(_thinned(rewards))}")
    elif losses := _values(records, LOSS):
        lines.append(f"loss       {losses[0]:.3f} -> {losses[-1]:.3f}   (first and last of {len(losses)} rollouts)")
        lines.append(f"           {sparkline(_thinned(losses))}")
    for name, (before, after) in eval_before_after(records).items():
        if len(_values(records, f"eval/{name}")) > 1:
            lines.append(f"held out   {before:.3f} -> {after:.3f}   ({name})")
        else:
            lines.append(f"held out   {after:.3f}   ({name}){_details(records, f'eval/{name}/')}")
    return lines


def _details(records: list[dict[str, Any]], prefix: str) -> str:
    """pass@k, truncation and length of a set, as the rest of its line."""
    last = {
        name.removeprefix(prefix): value
        for record in records
        for name, value in record.items()
        if name.startswith(prefix) and value is not None
    }
    shown = [name for name in last if name.startswith("pass@")] + ["truncated_ratio", "response_length"]
    return "".join(f"  {name.replace('_', ' ')} {last[name]:.3g}" for name in shown if name in last)


def _time_lines(records: list[dict[str, Any]]) -> list[str]:
    total = _whole(records)
    if not total:
        return []
    count = len(_values(records, "perf/step_time"))
    what = f", {count} {'rollout' if count == 1 else 'rollouts'}" if count else ""
    lines = [f"{'time':<14}{'seconds':>9}{'share':>7}"]
    lines += [f"{label:<14}{value:>9.1f}{value / total:>7.0%}" for label, value in time_by_part(records).items()]
    lines.append(f"{'all':<14}{total:>9.1f}   {duration(total)}{what}")
    for label, name in (("generated", "perf/rollout_tokens_per_sec"), ("trained", "perf/train_tokens_per_sec")):
        if rates := _values(records, name):
            lines.append(f"{label:<14}{_mean(rates):>9.0f}   tokens/s")
    return lines


def _output_lines(run_dir: Path) -> list[str]:
    lines = [f"outputs in {run_dir}"]
    lines += [f"  {name:<15}{what}" for name, what in OUTPUTS if (run_dir / name).exists()]
    lines.append(f"curves: tensorboard --logdir {run_dir.parent}")
    return lines


def _whole(records: Sequence[dict[str, Any]]) -> float:
    return sum(sum(_values(records, name)) for name in WHOLE)


def _thinned(values: list[float], width: int = 60) -> list[float]:
    """At most `width` values: means of neighbours."""
    if len(values) <= width:
        return values
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [_mean(values[low:high]) for low, high in zip(edges[:-1], edges[1:], strict=True)]


def _values(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if record.get(name) is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m colloid.observe.summary RUN_DIR")
    print(summary(sys.argv[1]))
