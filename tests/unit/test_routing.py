"""Experts that the engine chose, from its answer to the trainer's micro-batches; and the options that replay them."""

import base64
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import orjson
import pytest

from colloid.config import parse, routing
from colloid.config.sglang import embedded_options
from colloid.data.columns import to_columns
from colloid.data.routing import RoutingShape, decoded, routed_experts
from colloid.data.sample import Sample
from colloid.errors import ConfigError, DataError, EngineError
from colloid.rollout.direct import DirectRequests
from colloid.rollout.generate_sample import record_routing
from colloid.rollout.http import RequestRefused
from colloid.training.micro_batch import make_micro_batch
from colloid.training.sequence_split import SequenceSplit

SHAPE = RoutingShape(num_layers=2, num_chosen=3, num_experts=300)


def experts_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, (length, 2, 3)).astype(np.int16)


def answer_of(experts: np.ndarray) -> dict:
    text = base64.b64encode(experts.astype("<i4").tobytes()).decode()
    return {"output_ids": [1], "meta_info": {"routed_experts": text}}


def sample_of(index: int, prompt: int, response: int, **fields) -> Sample:
    sample = Sample(index=index, group_index=0, tokens=list(range(prompt)), reward=1.0)
    sample.append_response_tokens(list(range(response)), log_probs=[-1.0] * response)
    sample.rollout_routed_experts = experts_of(prompt + response - 1, index)
    sample.status = Sample.Status.COMPLETED
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def batch_of(samples):
    rewards = np.arange(len(samples), dtype=float)
    batch = to_columns(samples, raw_rewards=rewards, rewards=rewards)
    return replace(batch, routed_experts=routed_experts(samples, batch, SHAPE))


def test_what_an_answer_says_is_kept_with_the_sample_and_a_later_turns_replaces_it():
    sample = sample_of(0, 4, 3)
    record_routing(sample, answer_of(experts_of(6, 8)), SHAPE)
    assert sample.rollout_routed_experts.dtype == np.int16
    assert np.array_equal(sample.rollout_routed_experts, experts_of(6, 8))
    sample.append_response_tokens([7, 7], trained=False)
    sample.append_response_tokens([8], log_probs=[-1.0])
    record_routing(sample, answer_of(experts_of(9, 9)), SHAPE)
    assert np.array_equal(sample.rollout_routed_experts, experts_of(9, 9))
    sample.reset_response()
    assert sample.rollout_routed_experts is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there are none"),
        ("%%", "not base64"),
        ("AAAA", "not base64"),
        (base64.b64encode(bytes(4 * 6 * 5)).decode(), "has 30 numbers, and 7 tokens - 1 x 2 layers x 3 experts are 36"),
    ],
)
def test_an_answer_without_them_is_an_engine_error(text, message):
    with pytest.raises(EngineError, match=f"sample 4: routed_experts: .*{message}"):
        record_routing(sample_of(4, 4, 3), {"output_ids": [1], "meta_info": {"routed_experts": text}}, SHAPE)
    with pytest.raises(ValueError, match="numbers"):
        decoded(base64.b64encode(bytes(8)).decode(), 2, SHAPE)


def test_an_aborted_sample_without_a_token_has_none():
    sample = Sample(index=0, tokens=[1, 2], status=Sample.Status.ABORTED)
    record_routing(sample, {"output_ids": [], "meta_info": {"routed_experts": None}}, SHAPE)
    assert sample.rollout_routed_experts is None


def test_they_are_a_column_over_all_tokens_and_unknown_at_the_last():
    samples = [sample_of(0, 4, 3), sample_of(1, 2, 5), sample_of(2, 3, 2)]
    batch = batch_of(samples)
    assert batch.routed_experts.dtype == np.int16 and len(batch.routed_experts) == len(batch.tokens)
    for row, sample in enumerate(samples):
        own = batch.routed_experts[batch.offsets[row] : batch.offsets[row + 1]]
        assert np.array_equal(own[:-1], sample.rollout_routed_experts) and (own[-1] == -1).all()
    picked = batch.select(np.array([2, 0]))
    assert np.array_equal(picked.routed_experts[:4], samples[2].rollout_routed_experts)
    assert np.array_equal(picked.routed_experts[5:11], samples[0].rollout_routed_experts)


def test_tokens_behind_the_last_request_need_none_and_neither_do_samples_that_are_not_trained():
    tool = sample_of(0, 4, 3)
    tool.append_response_tokens([9, 9, 9], trained=False)
    removed = sample_of(1, 4, 3, remove_sample=True, rollout_routed_experts=None)
    failed = sample_of(2, 4, 3, status=Sample.Status.FAILED, rollout_routed_experts=None)
    batch = batch_of([tool, removed, failed])
    assert (batch.routed_experts[6:] == -1).all() and (batch.routed_experts[:6] >= 0).all()


def test_lists_as_json_makes_of_them_are_the_same_column():
    samples = [sample_of(0, 4, 3), sample_of(1, 2, 5)]
    stored = orjson.dumps([sample.to_dict() for sample in samples], option=orjson.OPT_SERIALIZE_NUMPY)
    read = [Sample.from_dict(data) for data in orjson.loads(stored)]
    assert np.array_equal(batch_of(read).routed_experts, batch_of(samples).routed_experts)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, r"1 of 2 samples do not say which experts the engine chose: \[7\]"),
        (experts_of(5), "1 of 2 samples do not say"),
        (
            experts_of(6)[:, :1],
            r"sample 7: rollout_routed_experts has the shape \[6, 1, 3\]; it must be \[tokens - 1, 2",
        ),
        (experts_of(6) + np.int16(300), "sample 7: .* and the model's 300 experts are 0 to 299"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_sample(experts, message):
    with pytest.raises(DataError, match=message):
        batch_of([sample_of(3, 4, 3), sample_of(7, 4, 3, rollout_routed_experts=experts)])


@pytest.mark.parametrize("size", [1, 2])
def test_a_micro_batch_knows_where_in_the_batch_its_tokens_are(size):
    batch = batch_of([sample_of(0, 4, 3), sample_of(1, 2, 7), sample_of(2, 3, 2)])
    seen: list[int] = []
    for rank in range(size):
        part = make_micro_batch(batch, np.array([2, 1]), split=SequenceSplit(rank, size, 2))
        index = part.token_index.numpy()
        tokens = part.tokens[0].numpy()
        assert index.shape == tokens.shape
        known = index >= 0
        assert np.array_equal(batch.tokens[index[known]], tokens[known]) and not tokens[~known].any()
        seen += index[known].tolist()
    assert sorted(seen) == list(range(7, len(batch.tokens)))


# ---- options

DENSE = ["--dry-run", "--device", "cpu", "--num-layers", "2", "--hidden-size", "8"]
SPARSE = [*DENSE, "--num-experts", "8", "--moe-router-topk", "2"]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (DENSE, "--use-routing-replay", "--use-routing-replay replays which experts .* and the model is dense"),
        (DENSE, "--use-rollout-routing-replay", "--use-rollout-routing-replay replays which .* the model is dense"),
        (SPARSE, "--use-rollout-routing-replay --loss-type sft_loss", "--loss-type sft_loss samples nothing"),
        (SPARSE, "--use-routing-replay --disable-compute-advantages-and-returns", "there are none"),
    ],
)
def test_what_cannot_be_replayed_is_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        parse([*model, *options.split()])


def test_a_kernel_that_chooses_by_itself_is_refused():
    args = parse([*SPARSE, "--use-routing-replay"])
    # On a CPU nothing is fused, whatever is asked for.
    args.device, args.moe_router_fusion = "cuda", True
    (said,) = filter(None, (rule(args) for rule in routing.RULES))
    assert "does not work with --moe-router-fusion" in said


def test_the_engine_records_where_its_experts_are_replayed():
    args = parse([*SPARSE, "--use-rollout-routing-replay", "--use-routing-replay"])
    assert embedded_options(args)["enable-return-routed-experts"] is True
    assert any("--use-routing-replay has no effect" in warning for warning in args.warnings)
    assert "enable-return-routed-experts" not in embedded_options(parse([*SPARSE, "--use-routing-replay"]))


# ---- requests that the router cannot pass on


def test_requests_for_experts_go_to_the_engine_that_has_the_prompt_unless_it_is_too_busy():
    requests = DirectRequests("router", ["a", "b"])
    with ExitStack() as stack:

        def send(prompt, **fields):
            return stack.enter_context(requests.target({"input_ids": prompt, **fields}))

        wanted = {"return_routed_experts": True}
        assert send([1]) == send([1], return_routed_experts=False) == "router"
        assert [send([1], **wanted) for _ in range(3)] == ["a", "a", "a"]
        assert send([2], **wanted) == "b"
        places = [send([1], **wanted) for _ in range(40)]
        assert places[:10] == ["a"] * 10 and "b" in places
        assert abs(places.count("a") - places.count("b")) < 25
    assert not requests._prompts and set(requests._load.values()) == {0}
    with DirectRequests("router", []).target(wanted) as url:
        assert url == "router"


@pytest.mark.parametrize(
    "asked",
    [
        {"sampling_params": {"logit_bias": {"5": 1.0}}},
        {"sampling_params": [{"n": 1}], "input_ids": [[1, 2]]},
        {"text": ["one", "two"]},
        {"input_ids": [[1], [2]], "return_logprob": [True, False]},
        {"no_such_field": 1},
    ],
    ids=str,
)
def test_what_a_router_would_drop_goes_to_an_engine_or_is_refused_where_only_the_router_may_send(asked):
    with DirectRequests("router", ["engine"]).target({"input_ids": [1], **asked}) as url:
        assert url == "engine"
    paired = DirectRequests("router", ["engine"], through_router=True)
    with pytest.raises(RequestRefused, match="does not pass on"), paired.target(asked):
        pass
    with paired.target({"input_ids": [1], "sampling_params": {"top_p": 0.5, "logit_bias": None}}) as url:
        assert url == "router"
