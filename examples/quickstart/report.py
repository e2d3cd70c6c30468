"""The end of the quick start: what the run learned, in numbers and in answers, and how to go on from there.

python examples/quickstart/report.py outputs/quickstart
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from colloid.observe.metrics import read_metrics
from colloid.observe.summary import eval_before_after, reward_before_after

NAME = "heldout"
"""Of the evaluation set (`--eval-prompt-data heldout …`)."""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.quickstart.report RUN_DIR")
    run_dir = Path(sys.argv[1])
    print("\n\n".join(filter(None, [scores(run_dir), answers(run_dir), commands(run_dir)])))


def scores(run_dir: Path) -> str:
    """Reward and held-out score, before and after."""
    records = read_metrics(run_dir)
    lines = []
    if (reward := reward_before_after(records)) is not None:
        lines.append(f"mean reward, first three -> last three steps:  {reward[0]:.2f} -> {reward[1]:.2f}")
    if NAME in (score := eval_before_after(records)):
        before, after = score[NAME]
        lines.append(f"held-out prompts answered right (greedy):      {before:.0%} -> {after:.0%}")
    return "\n".join(lines)


def answers(run_dir: Path, count: int = 5) -> str:
    """Held-out answers before and after training: first those that became right, then any."""
    files = sorted((run_dir / "rollouts").glob(f"eval_{NAME}_*.parquet"), key=rollout_of)
    if len(files) < 2:
        return ""
    before, after = (_samples(path) for path in (files[0], files[-1]))
    pairs = [(prompt, before[prompt], after[prompt]) for prompt in before if prompt in after]
    pairs.sort(key=lambda pair: pair[1][1] - pair[2][1])
    lines = ["example answers (right ones are marked +):", f"  {'The largest of':<16}{'before':<34}after"]
    for prompt, old, new in pairs[:count]:
        lines.append(f"  {_numbers(prompt):<16}{_marked(old):<34}{_marked(new)}")
    return "\n".join(lines)


def commands(run_dir: Path) -> str:
    """What to type next."""
    outputs = run_dir.parent
    return f"""outputs are in {run_dir}
the curves:            tensorboard --logdir {outputs}
train on from here:    bash scripts/quickstart.sh --continue --num-rollout 40
change the run:        bash scripts/quickstart.sh --seed 2 --lr 1e-5        (any option of train.py)
what would run:        bash scripts/quickstart.sh --dry-run
all options:           .venv/bin/python train.py --help"""


def rollout_of(path: Path) -> int:
    """The rollout id at the end of the name of an evaluation's file."""
    return int(path.stem.rsplit("_", 1)[1])


def _samples(path: Path) -> dict[str, tuple[str, float]]:
    """By prompt: response and reward."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path, columns=["prompt", "response", "reward"]).to_pylist()
    return {str(row["prompt"]): (row["response"], float(row["reward"] or 0.0)) for row in table}


def _numbers(prompt: str) -> str:
    match = re.search(r"largest: ([\d, ]+)\?", prompt)
    return match.group(1) if match else prompt[-14:]


def _marked(answer: tuple[str, float]) -> str:
    response, reward = answer
    return f"{'+' if reward > 0 else ' '} {response.removesuffix('<|im_end|>').strip()[:30]!r}"


if __name__ == "__main__":
    main()
