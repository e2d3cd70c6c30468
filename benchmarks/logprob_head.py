"""Time and memory of the log-prob head (forward and backward) beside its three matrix products.

One thread: OMP_NUM_THREADS=1 python benchmarks/logprob_head.py [--tokens 2048 --hidden 256 --vocab 32768 --entropy]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from colloid.training.logprob import token_log_probs


def seconds_of(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def megabytes_now() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def megabytes_at_most() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--chunk-tokens", type=int, default=-1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--entropy", action="store_true", help="also entropies, with their gradient")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.empty(options.tokens, options.hidden, dtype=dtype).normal_()
    weight = torch.empty(options.vocab, options.hidden, dtype=dtype).normal_(std=0.05)
    hidden.requires_grad_()
    weight.requires_grad_()
    targets = torch.randint(options.vocab, (options.tokens,))

    def head() -> None:
        hidden.grad = weight.grad = None
        log_probs, entropies = token_log_probs(
            hidden, weight, targets, temperature=0.7, chunk_tokens=options.chunk_tokens, with_entropy=options.entropy
        )
        (log_probs.sum() if entropies is None else log_probs.sum() + entropies.sum()).backward()

    before = megabytes_now()
    head()
    extra = megabytes_at_most() - before

    logits = torch.empty(options.tokens, options.vocab)
    hidden32, weight32 = hidden.detach().float(), weight.detach().float()

    def products() -> None:
        torch.mm(hidden32, weight32.t(), out=logits)
        torch.mm(logits, weight32)
        torch.mm(logits.t(), hidden32)

    products()
    # In turns, and the best of each: other processes' load hits both.
    pairs = [(seconds_of(head), seconds_of(products)) for _ in range(options.rounds)]
    head_seconds, products_seconds = (min(column) for column in zip(*pairs, strict=True))
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in (hidden, weight)) / 2**20
    print(f"head {head_seconds:.3f} s, three matrix products {products_seconds:.3f} s")
    print(f"ratio {head_seconds / products_seconds:.2f}")
    print(
        f"extra memory {extra:.0f} MB, of which {gradients:.0f} MB gradients (logits: {logits.nbytes / 2**20:.0f} MB)"
    )


if __name__ == "__main__":
    main()
