"""Where the time of a step went in a run, beside what matrix products alone would take on this machine.

    python benchmarks/step_budget.py outputs/quickstart

Prints the mean seconds of each part of a step, and tokens/s of generation and training beside the GEMM limit: the
tokens/s if every floating-point operation of the model's linears (2 a parameter and token forward, 6 forward and
backward) ran at the speed that one large matrix product reaches here, on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import yaml

PARTS = ("rollout_time", "train_time", "save_time", "update_weights_time", "offload_time")


def gemm_gflops(dtype: torch.dtype, rows: int, repeats: int = 20) -> float:
    """The best of some products of [rows, 576] and [576, 1536] (SmolLM2's widest linear), in GFLOP/s."""
    x, w = torch.randn(rows, 576).to(dtype), torch.randn(576, 1536).to(dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        x @ w
        best = min(best, time.perf_counter() - start)
    return 2 * rows * 576 * 1536 / best / 1e9


def linear_parameters(config: dict) -> tuple[int, int]:
    """Parameters in the layers' linears, and in the head."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * config.get("num_key_value_heads", heads))
    return config["num_hidden_layers"] * (attention + 3 * hidden * ffn), hidden * config["vocab_size"]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "perf/step_time" in row][1:]  # the first one warms up
    mean = lambda name: sum(row.get(name, 0.0) for row in steps) / len(steps)  # noqa: E731
    total = mean("perf/step_time")
    print(f"{len(steps)} steps of {total:.2f} s on average")
    rest = total
    for part in PARTS:
        seconds = mean(f"perf/{part}")
        rest -= seconds
        print(f"  {part:<22} {seconds:7.2f} s  {100 * seconds / total:5.1f} %")
    print(f"  {'the rest':<22} {rest:7.2f} s  {100 * rest / total:5.1f} %")

    args = yaml.safe_load((run_dir / "args.yaml").read_text())
    body, head = linear_parameters(json.loads((Path(args["hf_checkpoint"]) / "config.json").read_text()))
    for name, rate, flops, rows_at_once in (
        ("generation", "perf/rollout_tokens_per_sec", 2 * (body + head), 64),
        ("training", "perf/train_tokens_per_sec", 6 * body, 1024),
    ):
        gflops = gemm_gflops(torch.float32, rows_at_once)
        limit = gflops * 1e9 / flops
        print(
            f"{name}: {mean(rate):.0f} tokens/s; GEMM limit {limit:.0f} tokens/s "
            f"({gflops:.0f} GFLOP/s at {rows_at_once} rows); {100 * mean(rate) / limit:.0f} %"
        )


if __name__ == "__main__":
    main()
