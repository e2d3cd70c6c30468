"""Memory of trainer and engine in each phase of a step, with and without taking turns.

    python -m benchmarks.colocation [--hidden 1024] [--layers 6] [--vocab 32000] [--rollouts 3] [--keep DIR]

Makes a random model, trains it twice with `train.py --colocate` on one host without CUDA, and prints the last step's
resident memory as the run's own metrics tell it (`perf/memory/…`), and the greatest sum of both processes that was
seen from outside, from start to end, every 20 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from examples.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
WAYS = {"in turns": (), "side by side": ("--no-offload-train", "--no-offload-rollout")}
PHASES = ("rollout", "training", "update")
ROLES = {"trainer": "ray::TrainWorker", "engine": "colloid.engines.embedded"}
BUCKET_BYTES = 64 << 20
SAMPLE_SECONDS = 0.02
TIMEOUT = 1800


@dataclass(eq=False)
class Watch(threading.Thread):
    """The greatest sum of trainer and engine, among the processes that `parent` starts."""

    parent: int
    largest: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()

    def run(self) -> None:
        found: dict[str, psutil.Process] = {}
        looked = 0.0
        while not self.ended.wait(SAMPLE_SECONDS):
            if len(found) < len(ROLES) and time.monotonic() - looked > 0.5:
                found, looked = self._find(), time.monotonic()
            try:
                sizes = {role: process.memory_info().rss / GIB for role, process in found.items()}
            except psutil.NoSuchProcess:
                found = {}
                continue
            if sum(sizes.values()) > self.largest:
                self.largest, self.parts = sum(sizes.values()), sizes

    def _find(self) -> dict[str, psutil.Process]:
        found = {}
        for process in psutil.Process(self.parent).children(recursive=True):
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            found |= {role: process for role, mark in ROLES.items() if mark in line}
        return found


def train(place: Path, name: str, options: tuple, rollouts: int) -> tuple[dict[str, float], Watch]:
    """The last step's metrics, and what was seen from outside."""
    command = [
        *(sys.executable, ROOT / "train.py", "--hf-checkpoint", place / "model", "--prompt-data", place / "data.jsonl"),
        *("--colocate", "--device", "cpu", "--rm-type", "random", "--rollout-batch-size", 4, "--lr", 1e-5),
        *(
            "--update-weight-buffer-size",
            BUCKET_BYTES,
            "--n-samples-per-prompt",
            2,
            "--rollout-max-response-len",
            8,
            "--num-rollout",
            rollouts,
        ),
        *("--outputs-dir", place / "outputs", "--run-name", name.replace(" ", "-"), "--deterministic", *options),
    ]
    log = place / f"{name.replace(' ', '-')}.txt"
    with log.open("w") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            list(map(str, command)), cwd=place, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            watch = Watch(process.pid)
            watch.start()
            code = process.wait(TIMEOUT)
            watch.ended.set()
        finally:
            process.kill()
    if code:
        sys.exit(f"the run ended with {code}:\n{log.read_text()[-3000:]}")
    lines = (place / "outputs" / name.replace(" ", "-") / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1]), watch


def table(found: dict[str, tuple[dict[str, float], Watch]]) -> str:
    """As it stands in docs/colocation.md."""
    lines = ["| phase | " + " | ".join(f"{way}: trainer + engine = sum" for way in found) + " |"]
    lines.append("|---|" + "---|" * len(found))
    for what, title in (("rss", "end of {}"), ("rss_peak", "peaks during {}")):
        for phase in PHASES:
            cells = []
            for metrics, _ in found.values():
                sizes = [metrics[f"perf/memory/{phase}/{role}_{what}_gib"] for role in ROLES]
                cells.append(f"{sizes[0]:.2f} + {sizes[1]:.2f} = {sum(sizes):.2f}")
            lines.append(f"| {title.format(phase)} | " + " | ".join(cells) + " |")
    seen = [f"{watch.largest:.2f}" for _, watch in found.values()]
    lines.append("| greatest sum at any time | " + " | ".join(seen) + " |")
    for name in ("offload_time", "update_weights_time", "train_time"):
        seconds = [f"{metrics.get(f'perf/{name}', 0.0):.1f}" for metrics, _ in found.values()]
        lines.append(f"| `perf/{name}` in s | " + " | ".join(seconds) + " |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("hidden", 1024), ("layers", 6), ("vocab", 32000), ("rollouts", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--keep", type=Path, help="a directory for model and runs; default: one that is removed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="colocation-") as temporary:
        place = args.keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        sizes = {"hidden": args.hidden, "layers": args.layers, "vocab": args.vocab}
        make_tiny_model(place / "model", heads=8, initializer_range=0.02, **sizes)
        size = (place / "model" / "model.safetensors").stat().st_size
        rows = [{"prompt": f"What is {n} + 3?", "label": str(n + 3)} for n in range(64)]
        (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = {way: train(place, way, options, args.rollouts) for way, options in WAYS.items()}
    print(f"\nGiB resident; the model's weights in float32: {size / GIB:.2f}\n")
    print(table(found))


if __name__ == "__main__":
    main()
