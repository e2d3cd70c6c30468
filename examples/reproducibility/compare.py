"""Are runs the same? Compares metrics and weights with those of the first run, value by value, bit by bit.

python -m examples.reproducibility.compare RUN_DIR RUN_DIR [RUN_DIR …]
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from colloid.observe.metrics import read_metrics

EXCEPT = ("perf/", "engine/", "router/")
"""Times, and which engines there were."""


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: python -m examples.reproducibility.compare RUN_DIR RUN_DIR [RUN_DIR …]")
    first, *others = map(Path, sys.argv[1:])
    found = [line for other in others for line in differences(first, other)]
    if found:
        sys.exit("\n".join(found))
    print("no difference")


def differences(first: Path, other: Path) -> list[str]:
    """What differs in the rollouts that `other` has, and in its last weights; prints what was compared."""
    expected = {record["step"]: _values(record) for record in read_metrics(first)}
    records = {record["step"]: _values(record) for record in read_metrics(other)}
    found = (
        [f"{other}: rollouts {sorted(records)}, and in {first} {sorted(expected)}"]
        if records.keys() - expected.keys()
        else []
    )
    count = 0
    for step in sorted(records.keys() & expected.keys()):
        names = sorted(records[step].keys() | expected[step].keys())
        count += len(names)
        found += [
            f"{other}: rollout {step}, {name}: {records[step].get(name)}, and in {first} {expected[step].get(name)}"
            for name in names
            if records[step].get(name) != expected[step].get(name)
        ]
    weights, number = _weights(other)
    if (weights, number) != _weights(first):
        found.append(f"{other}: other weights after rollout {number} than in {first}")
    print(
        f"{other.name} and {first.name}: {count} values of rollouts {min(records)} to {max(records)}, weights {weights}"
    )
    return found


def _values(record: dict) -> dict:
    return {name: value for name, value in record.items() if not name.startswith(EXCEPT)}


def _weights(run_dir: Path) -> tuple[str, int]:
    """A digest of the last checkpoint's tensors (weights and optimizer), and its rollout."""
    last = int((run_dir / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted((run_dir / f"checkpoints/iter_{last:07d}/trainer").rglob("*.distcp")):
        digest.update(path.read_bytes())
    return digest.hexdigest(), last


if __name__ == "__main__":
    main()
