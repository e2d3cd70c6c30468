"""A request's tokens and log-probs are bitwise the same whatever else is in the engine."""

import random

import pytest
import torch

from colloid.engines.embedded.invariance import required_rows, smallest_invariant
from tests.engine.models import add, make_engine, prompt_of, run, stream_of

pytestmark = pytest.mark.timeout(60)
TARGET = {"max_new_tokens": 40, "temperature": 0.9, "ignore_eos": True, "sampling_seed": 99}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(
    scope="module", params=[("llama-gqa-tied", "float32"), ("qwen3-untied", "float32"), ("qwen2-tied", "bfloat16")]
)
def made(request, model_paths):
    variant, dtype = request.param
    return make_engine(model_paths[variant], DTYPES[dtype], context_length=1024)


def company(engine, count: int, seed: int) -> None:
    """Other requests, some in groups, some with the same prompt, greedy and drawn, of many lengths."""
    choose = random.Random(seed)
    for i in range(count):
        prompt = prompt_of(choose.randint(1, 300), 500, choose.randint(0, count // 2))
        temperature, n = choose.choice([1.0, 0.7, 0.0]), choose.choice([1, 1, 1, 3])
        top_p = choose.choice([1.0, 0.9])
        tokens = choose.randint(1, 50)
        add(engine, f"c{i}", prompt, max_new_tokens=tokens, temperature=temperature, top_p=top_p, sampling_seed=i, n=n)


def alone(engine, prompt):
    (sequence,) = add(engine, "alone", prompt, **TARGET)
    run(engine)
    return stream_of(sequence)


@pytest.mark.parametrize("length", [1, 64, 97, 230, 600])
def test_alone_or_among_60_others_before_or_behind_them(made, length):
    engine, prompt = made.engine, prompt_of(length, 500, 7)
    expected = alone(engine, prompt)
    company(engine, 20, seed=1)
    (middle,) = add(engine, "middle", prompt, **TARGET)
    choose = random.Random(2)
    for i in range(40):
        add(engine, f"d{i}", prompt_of(choose.randint(1, 200), 500, i), max_new_tokens=choose.randint(1, 60))
    run(engine)
    assert stream_of(middle) == expected


@pytest.mark.parametrize("length", [31, 64, 230])
def test_one_of_eight_samples_or_late_to_a_prompt_that_is_in_the_cache(made, length):
    engine, prompt = made.engine, prompt_of(length, 500, 8)
    expected = alone(engine, prompt)
    group = add(engine, "group", prompt, **TARGET, n=8)
    run(engine)
    assert stream_of(group[0]) == expected
    (early,) = add(engine, "early", prompt, max_new_tokens=60, ignore_eos=True, sampling_seed=1)
    for _ in range(20):
        engine.step()
    (late,) = add(engine, "late", prompt, **TARGET)
    run(engine)
    assert late.cached_tokens == length and early.cached_tokens == 0
    assert stream_of(late) == expected


def test_samples_of_a_group_differ_from_each_other(made):
    group = add(made.engine, "g", prompt_of(20, 500, 9), **TARGET, n=6)
    run(made.engine)
    assert len({tuple(sequence.output_ids) for sequence in group}) == 6


def test_this_machines_kernels_need_no_more_rows_than_assumed(made):
    rows = required_rows(made.model)
    assert rows["min_rows"] <= 16 and rows["min_query_rows"] <= 16


def test_the_check_of_kernels_finds_a_kernel_that_depends_on_the_number_of_rows():
    assert smallest_invariant(lambda n: torch.full((n, 2), float(n < 4))) == 4
    assert smallest_invariant(lambda n: torch.ones(n, 2)) == 1
