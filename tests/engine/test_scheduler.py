"""Page bookkeeping and admission: plain data, so properties hold for any order of events."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.engines.contract_fields import BadRequest
from colloid.engines.embedded.pages import PageTable
from tests.engine.models import add, make_engine, prompt_of, run, stream_of

pytestmark = pytest.mark.timeout(60)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("asr"), st.integers(0, 100)), max_size=120), st.integers(2, 20))
def test_pages_stay_dense_and_keep_their_content(events, capacity):
    content: dict[int, int] = {}
    table = PageTable(capacity, lambda source, destination: content.__setitem__(destination, content[source]))
    live: dict[object, int] = {}
    for number, (event, choice) in enumerate(events):
        if event == "a" and table.num_used < capacity:
            page = table.allocate()
            live[page] = content[page.index] = number
        elif event == "s" and table.own:
            table.share(table.own[choice % len(table.own)])
        elif event == "r" and live:
            page = list(live)[choice % len(live)]
            table.release(page)
            del live[page]
        assert {page: content[page.index] for page in live} == live
        assert [page.index for page in table.own] == list(range(len(table.own)))
        assert [page.index for page in table.shared] == [table.size - 1 - i for i in range(len(table.shared))]
        assert len(table.own) + len(table.shared) == len(live)


@pytest.fixture(scope="module")
def small(model_paths):
    """Room for 512 positions: a few requests at a time."""
    return make_engine(model_paths["llama-gqa-tied"], tokens=512, context_length=1024, max_running=8)


def assert_empty(engine):
    assert engine.scheduler.num_running == 0 and engine.scheduler.pages.num_used == 0
    assert engine.scheduler._reserved == 0 and not engine.scheduler._prefixes


def test_what_does_not_fit_now_waits_and_gives_the_same_tokens(small, model_paths):
    requests = [(f"r{i}", prompt_of(20 + 7 * i, 500, i), 30 + 5 * i) for i in range(20)]
    roomy = make_engine(model_paths["llama-gqa-tied"], context_length=1024)
    streams = []
    for engine in (small.engine, roomy.engine):
        parameters = {"ignore_eos": True, "temperature": 1.0}
        made = [
            add(engine, rid, prompt, max_new_tokens=n, sampling_seed=n, **parameters)[0] for rid, prompt, n in requests
        ]
        run(engine)
        streams.append([stream_of(sequence) for sequence in made])
        assert_empty(engine)
    assert streams[0] == streams[1]


@pytest.mark.parametrize(
    ("length", "new", "message"),
    [
        (500, 100, "room for 512"),
        (1000, 100, "maximum context length of 1024"),
        (1100, 1, "longer than the model's context length"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(small, length, new, message):
    with pytest.raises(BadRequest, match=message):
        add(small.engine, "x", prompt_of(length, 500, 1), max_new_tokens=new)
    assert_empty(small.engine)


def test_requests_with_the_same_prompt_compute_it_once(model_paths):
    engine = make_engine(model_paths["llama-gqa-tied"]).engine
    prompt = prompt_of(100, 500, 4)
    for i in range(8):
        add(engine, f"s{i}", prompt, max_new_tokens=10, ignore_eos=True)
    run(engine)
    assert engine.prompt_tokens_computed == 100


def test_random_arrivals_aborts_retractions_and_flushes_leave_the_engine_empty(small):
    engine, choose = small.engine, random.Random(0)
    made = []
    for i in range(150):
        event = choose.random()
        if event < 0.35:
            prompt = prompt_of(choose.randint(1, 120), 500, choose.randint(0, 6))
            new = choose.randint(0, 60)
            made += add(engine, f"e{i}", prompt, max_new_tokens=new, n=choose.choice([1, 1, 4]), ignore_eos=True)
        elif event < 0.4 and made:
            engine.abort(choose.choice(made).rid)
        elif event < 0.43:
            engine.retract()
        elif event < 0.46:
            engine.forget_prefixes()
        else:
            engine.step()
    run(engine)
    assert_empty(engine)
    for sequence in made:
        reason = sequence.finish_reason
        assert reason.type in ("length", "abort")
        assert reason.type == "abort" or len(sequence.output_ids) == sequence.max_new_tokens


def test_a_long_prompt_goes_in_by_chunks_beside_running_requests(model_paths):
    engine = make_engine(model_paths["qwen3-untied"], context_length=2048).engine
    prompt = prompt_of(1700, 500, 2)
    (expected,) = add(engine, "a", prompt, max_new_tokens=8, sampling_seed=3)
    run(engine)
    add(engine, "b", prompt_of(30, 500, 5), max_new_tokens=50, ignore_eos=True)
    engine.step()
    (chunked,) = add(engine, "c", prompt, max_new_tokens=8, sampling_seed=3)
    run(engine)
    assert stream_of(chunked) == stream_of(expected)


def test_request_ids_are_unique_while_in_use(small):
    add(small.engine, "same", prompt_of(5, 500, 1), max_new_tokens=3)
    with pytest.raises(BadRequest, match="'same' is in use"):
        add(small.engine, "same", prompt_of(5, 500, 1), max_new_tokens=3)
    run(small.engine)
    add(small.engine, "same", prompt_of(5, 500, 1), max_new_tokens=3)
    run(small.engine)
