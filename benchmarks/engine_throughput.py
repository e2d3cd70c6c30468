"""Tokens per second of the embedded engine, without HTTP: one process, as many threads as OMP_NUM_THREADS says.

usage: OMP_NUM_THREADS=1 python benchmarks/engine_throughput.py MODEL_DIR [--dtype bfloat16] [--batch 1 8 32 64]

Each batch is measured twice: with distinct prompts, and in groups of 8 samples of one prompt (which share its prefill
and the reading of its keys and values). Prompts of --prompt-length random tokens, --new-tokens new ones each, sampled
at temperature 1 with log-probabilities; the time includes prefill. The best of --repeats runs counts.
"""

import argparse
import time

import torch

from colloid.engines.contract_generate import GenerateInput, SamplingParams
from colloid.engines.embedded.engine import Engine
from colloid.engines.embedded.memory import keep_freed_memory
from colloid.engines.embedded.model import Model
from colloid.engines.embedded.model_config import load_model_config
from colloid.engines.embedded.text import Text
from colloid.engines.embedded.weights import WeightStore, load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure(engine: Engine, batch: int, group: int, prompt_length: int, new_tokens: int, seed: int) -> tuple:
    """(tokens/s, prefill ms, decode ms a step) of one run from an empty engine to an empty engine."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(max(batch // group, 1)):
        prompt = tuple(torch.randint(5, 40000, (prompt_length,), generator=generator).tolist())
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, sampling_seed=i, n=min(group, batch))
        request = GenerateInput(prompt, None, params, f"request-{i}", True)
        engine.add(engine.make_sequences(request, prompt, lambda sequence: None, stream=False))
    before, started = engine.tokens_generated, time.perf_counter()
    prefill = decode = steps = 0
    while engine.scheduler.has_work:
        is_prefill = bool(engine.scheduler.waiting or engine.scheduler.prefills)
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        prefill += seconds * is_prefill
        decode += seconds * (not is_prefill)
        steps += not is_prefill
    total = time.perf_counter() - started
    return (engine.tokens_generated - before) / total, prefill * 1e3, decode * 1e3 / max(steps, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_path")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    keep_freed_memory()
    config = load_model_config(args.model_path)
    length = args.prompt_length + args.new_tokens
    model = Model(config, DTYPES[args.dtype], length)
    load_weights(WeightStore(model), args.model_path)
    engine = Engine(
        model,
        Text(args.model_path, (), skip=True),
        capacity_tokens=max(args.batch) * (length + 128),
        context_length=length,
        max_running=max(args.batch),
    )
    print(f"{args.dtype}, {torch.get_num_threads()} thread(s), {args.prompt_length} + {args.new_tokens} tokens")
    for batch in args.batch:
        for group in (1, 8) if batch >= 8 else (1,):
            runs = [
                measure(engine, batch, group, args.prompt_length, args.new_tokens, seed) for seed in range(args.repeats)
            ]
            rate, prefill, step = max(runs)
            kind = "distinct prompts" if group == 1 else f"groups of {group}"
            print(f"batch {batch:3d}, {kind:16s}: {rate:6.1f} tokens/s (prefill {prefill:.0f} ms, step {step:.1f} ms)")


if __name__ == "__main__":
    main()
