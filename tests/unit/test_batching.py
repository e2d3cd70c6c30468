"""What the options say about micro-batches: budgets of ranks that share sequences, and the cost of a sequence."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colloid.config import parse
from colloid.data.packing import pack_by_tokens
from colloid.rollout.batching import micro_batch_bounds
from colloid.rollout.costs import sequence_costs
from colloid.training.sequence_split import SequenceSplit

DENSE = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --kv-channels 16 --swiglu"


def plan(text: str):
    return parse(["--dry-run", "--device", "cpu", *DENSE.split(), *text.split()])


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=30).map(np.asarray),
    budget=st.integers(1, 60),
    context=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2, 4]),
)
@example(lengths=np.asarray([1, 1]), budget=1, context=1, tensor=2)
@settings(deadline=None, max_examples=60)
def test_a_rank_never_has_more_tokens_than_its_budget_padding_included(lengths, budget, context, tensor):
    sizes = f"--context-parallel-size {context} --tensor-model-parallel-size {tensor} --sequence-parallel"
    args = plan(f"--use-dynamic-batch-size --max-tokens-per-gpu {budget} {sizes} --num-query-groups 4")
    bounds = micro_batch_bounds(args)
    split = SequenceSplit(size=context, multiple=tensor if args.sequence_parallel else 1)
    for pack in pack_by_tokens(bounds.padded(lengths), bounds.max_tokens):
        tokens = int(split.padded_lengths(lengths[pack]).sum())
        assert tokens % (context * split.multiple) == 0
        assert tokens <= budget * context or len(pack) == 1


def test_bounds_are_those_of_the_options():
    bounds = micro_batch_bounds(plan("--micro-batch-size 3"))
    assert (bounds.micro_batch_size, bounds.max_tokens, bounds.log_probs_max_tokens) == (3, None, None)
    bounds = micro_batch_bounds(
        plan("--use-dynamic-batch-size --max-tokens-per-gpu 100 --log-probs-max-tokens-per-gpu 300")
    )
    assert (bounds.micro_batch_size, bounds.max_tokens, bounds.log_probs_max_tokens) == (None, 100, 300)


def ratio(args) -> float:
    """Cost of a sequence's linears over that of its attention, a token."""
    return sequence_costs(args, np.asarray([1]))[0] - 1


def test_costs_are_linear_and_quadratic_parts_as_the_model_has_them():
    args = plan("--num-query-groups 2 --vocab-size 1000 --group-query-attention")
    lengths = np.asarray([0, 1, 10, 1000])
    attention = 4 * 4 * 2 * 16
    weights = 4 * (64 * (4 + 2 + 2 + 4) * 16 + 3 * 64 * 192) + 64 * 1000
    assert sequence_costs(args, lengths).tolist() == (lengths * round(2 * weights / attention) + lengths**2).tolist()


def test_of_experts_those_count_that_a_token_meets():
    moe = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-layer-freq [0]+[1]*3 --num-query-groups 4"
    shared = plan(f"{moe} --moe-shared-expert-intermediate-size 32")
    weights = 4 * 64 * 16 * 16 + 3 * 64 * (192 + 3 * (2 * 96 + 32))
    assert ratio(shared) == round(2 * weights / (4 * 4 * 32))
    assert ratio(plan(moe)) < ratio(shared)


def test_latent_attention_has_its_own_widths():
    args = plan(
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 16"
    )
    weights = 24 * (64 + 4 * 24) + 32 * (64 + 4 * 32) + 64 * 8 + 4 * 16 * 64 + 3 * 64 * 192
    assert ratio(args) == pytest.approx(2 * weights / (4 * (24 + 16)), abs=0.5)
