"""The log-prob head with its vocabulary split over two ranks equals the head of one rank."""

import torch
import torch.distributed as dist

from colloid.training.logprob import token_log_probs
from tests.parallel.ranks import run_ranks

TOKENS, HIDDEN, VOCAB = 13, 8, 40


def make_case(vocab_size):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab_size, (TOKENS,), generator=generator)
    upstream = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), weight, targets, upstream


def outcome(hidden, weight, targets, upstream, **options):
    weight = weight.clone().requires_grad_()
    log_probs, entropies = token_log_probs(hidden, weight, targets, temperature=0.7, with_entropy=True, **options)
    grads = torch.autograd.grad((log_probs * upstream[0] + entropies * upstream[1]).sum(), (hidden, weight))
    return log_probs.detach(), entropies.detach(), *grads


def compare_on_rank(rank, world_size, init_method):
    """The number of cases that were compared."""
    sizes = (VOCAB, 33, 20, 7)  # with padding, up to a rank that holds nothing else
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    try:
        for vocab_size in sizes:
            hidden, weight, targets, upstream = make_case(vocab_size)
            rows = slice(rank * VOCAB // world_size, (rank + 1) * VOCAB // world_size)
            ours = outcome(hidden, weight[rows], targets, upstream, tp_group=dist.group.WORLD, vocab_size=vocab_size)
            *expected, weight_grad = outcome(hidden, weight[:vocab_size], targets, upstream)
            padded = torch.zeros_like(weight)
            padded[:vocab_size] = weight_grad
            for left, right in zip(ours, [*expected, padded[rows]], strict=True):
                torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)
    finally:
        dist.destroy_process_group()
    return len(sizes)


def test_two_vocabulary_shards_equal_one(tmp_path):
    assert run_ranks(compare_on_rank, 2, tmp_path / "ranks") == [4, 4]
