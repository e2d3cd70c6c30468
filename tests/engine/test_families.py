"""Families with experts, latent attention or further norms against transformers' own classes in float64."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from colloid.engines.embedded.invariance import required_rows
from colloid.engines.embedded.linear import PackedLinear
from colloid.engines.embedded.model_config import ExpertsConfig
from colloid.engines.embedded.moe import ExpertMlp
from colloid.engines.embedded.weights import tensor_checksum
from colloid.errors import ConfigError, WeightSyncError
from tests.engine.families import FAMILIES, make_family
from tests.engine.models import add, make_engine, prompt_of, run, stream_of

pytestmark = pytest.mark.timeout(60)
VOCAB = 500
TARGET = {"max_new_tokens": 18, "temperature": 0.9, "ignore_eos": True, "sampling_seed": 99}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    base = tmp_path_factory.mktemp("families")
    return {name: make_family(name, base / name) for name in FAMILIES}


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request, paths):
    path = paths[request.param]
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **eager)
    return make_engine(path), reference.double().eval(), path


def reference_logits(reference, ids) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([list(ids)])).logits[0]


@pytest.mark.parametrize("length", [1, 90, 700])
def test_logits_are_within_2e5_of_the_largest_logit(case, length):
    made, reference, _ = case
    prompt = prompt_of(length, VOCAB, length)
    (sequence,) = add(made.engine, "a", prompt, max_new_tokens=2)
    while sequence.prefix is None or not sequence.prefix.is_ready:
        made.engine.step()
    logits = sequence.prefix.next_logits
    run(made.engine)
    expected = reference_logits(reference, prompt)[-1]
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()


def test_greedy_output_is_that_of_generate_and_log_probs_that_of_a_teacher_forced_pass(case):
    made, reference, _ = case
    prompt = prompt_of(45, VOCAB, 3)
    greedy, drawn = (
        add(made.engine, f"t{t}", prompt, max_new_tokens=32, temperature=t, ignore_eos=True, sampling_seed=1)[0]
        for t in (0.0, 0.7)
    )
    run(made.engine)
    ids = torch.tensor([prompt])
    expected = reference.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy.output_ids == expected[0, len(prompt) :].tolist()
    for sequence, temperature in ((greedy, 1.0), (drawn, 0.7)):
        logits = reference_logits(reference, [*prompt, *sequence.output_ids])[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(sequence.output_ids)[:, None])
        assert (expected[:, 0] - torch.tensor(sequence.log_probs)).abs().max() < 2e-5


def test_weights_are_unpacked_exactly_as_they_came(case):
    made, _, path = case
    stored = load_file(path / "model.safetensors")
    assert made.store.checksums() == {name: tensor_checksum(tensor) for name, tensor in stored.items()}


def alone_and_among_others(engine, prompt) -> list:
    """The target's stream alone, and three times among others: before them, behind them, as one of a group."""
    (sequence,) = add(engine, "alone", prompt, **TARGET)
    run(engine)
    streams = [stream_of(sequence)]
    choose = random.Random(len(prompt))

    def company(tag: str) -> None:
        for i in range(12):
            length, tokens = choose.randint(1, 120), choose.randint(1, 20)
            add(engine, f"{tag}{i}", prompt_of(length, VOCAB, i), max_new_tokens=tokens, sampling_seed=i)

    (first,) = add(engine, "first", prompt, **TARGET)
    company("a")
    run(engine)
    company("b")
    engine.step()
    (last,) = add(engine, "last", prompt, **TARGET)
    run(engine)
    group = add(engine, "group", prompt, **TARGET, n=4)
    run(engine)
    return streams + [stream_of(s) for s in (first, last, group[0])]


def test_a_request_alone_is_bitwise_the_same_among_others(case):
    first, *others = alone_and_among_others(case[0].engine, prompt_of(97, VOCAB, 7))
    assert all(other == first for other in others)


def random_experts(scores: str, dtype: torch.dtype, hidden: int, num_experts: int) -> ExpertMlp:
    """So wide that the product of one row is rounded otherwise than that of several (float32, AVX-512)."""
    torch.manual_seed(0)
    config = ExpertsConfig(num_experts, 3, 40, 24, scores, True, 2.5, 2 if scores == "sigmoid" else 1, 1)
    mlp = ExpertMlp(config)
    mlp.router = PackedLinear(torch.randn(num_experts, hidden) * 0.1)
    mlp.choice_bias = torch.randn(num_experts) * 0.1
    for each in (*mlp.experts, mlp.shared):
        each.gate_up = PackedLinear((torch.randn(2 * each.inner, hidden) * 0.1).to(dtype))
        each.down = PackedLinear((torch.randn(hidden, each.inner) * 0.1).to(dtype))
    return mlp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_row_of_experts_is_bitwise_the_same_with_any_other_rows(scores, dtype):
    mlp = random_experts(scores, dtype, hidden=2048, num_experts=14)
    x = torch.randn(61, 2048).to(dtype)
    with torch.inference_mode():
        whole, (chosen, weights) = mlp(x), mlp.route(x)
        for start in range(0, 59, 2):
            for end in (start + 2, start + 3, min(start + 19, 61)):
                assert torch.equal(mlp(x[start:end])[0], whole[start])
                assert all(
                    torch.equal(a[0], b[start]) for a, b in zip(mlp.route(x[start:end]), (chosen, weights), strict=True)
                )


@pytest.mark.parametrize("name", ["glm4.5", "deepseek-v3"])
def test_bfloat16_is_bitwise_independent_of_company_too_and_near_float32(paths, name):
    low, high = make_engine(paths[name], torch.bfloat16), make_engine(paths[name])
    prompt = prompt_of(97, VOCAB, 7)
    first, *others = alone_and_among_others(low.engine, prompt)
    assert all(other == first for other in others)
    ids = [add(made.engine, "greedy", prompt, max_new_tokens=1, temperature=0)[0] for made in (low, high)]
    run(low.engine)
    run(high.engine)
    assert abs(ids[0].log_probs[0] - ids[1].log_probs[0]) < 0.5


def test_in_bfloat16_the_routers_bias_stays_float32_and_all_else_is_bfloat16(paths):
    made, stored = make_engine(paths["glm4.5"], torch.bfloat16), load_file(paths["glm4.5"] / "model.safetensors")
    expected = {k: v if k.endswith("e_score_correction_bias") else v.bfloat16() for k, v in stored.items()}
    assert made.store.checksums() == {name: tensor_checksum(tensor) for name, tensor in expected.items()}


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_this_machines_kernels_need_no_more_rows_than_assumed(paths, name):
    rows = required_rows(make_engine(paths[name]).model)
    assert rows["min_rows"] <= 16 and rows["min_query_rows"] <= 16


@pytest.mark.parametrize(
    "missing",
    [
        "model.layers.2.mlp.experts.7.up_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.self_attn.kv_a_layernorm.weight",
    ],
)
def test_an_update_without_one_of_the_experts_tensors_is_incomplete(paths, missing):
    made, stored = make_engine(paths["deepseek-v3"]), load_file(paths["deepseek-v3"] / "model.safetensors")
    made.store.begin()
    for name, tensor in stored.items():
        if name != missing:
            made.store.receive(name, tensor)
    with pytest.raises(WeightSyncError, match=f"1 of {len(stored)} tensors are missing: {missing}"):
        made.store.finish()


def test_an_expert_that_the_model_does_not_have_is_refused(paths):
    store = make_engine(paths["qwen3-moe"]).store
    store.begin()
    with pytest.raises(WeightSyncError, match="experts.8.up_proj"):
        store.receive("model.layers.1.mlp.experts.8.up_proj.weight", torch.zeros(40, 64))


def test_updated_experts_and_biases_are_what_the_engine_computes_with(paths):
    path = paths["glm4.5"]
    made, fresh = make_engine(path), make_engine(path)
    generator = torch.Generator().manual_seed(5)
    stored = load_file(path / "model.safetensors")
    changed = {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in stored.items()}
    prompt = prompt_of(60, VOCAB, 1)
    (before,) = add(made.engine, "before", prompt, **TARGET)
    run(made.engine)
    for store in (made.store, fresh.store):
        store.begin()
        for name in sorted(changed, reverse=store is fresh.store):
            store.receive(name, changed[name])
        store.finish()
    after = [add(each.engine, "after", prompt, **TARGET)[0] for each in (made, fresh)]
    run(made.engine)
    run(fresh.engine)
    assert stream_of(after[0]) == stream_of(after[1]) != stream_of(before)
    assert made.store.checksums() == {name: tensor_checksum(tensor) for name, tensor in changed.items()}


def edited(path, directory, change):
    """A copy of a model's directory whose config.json was changed."""
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def in_the_hubs_spelling(config) -> None:
    """As Kimi K2's config.json is written: a model_type of its own, rope_theta beside rope_scaling."""
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    config.update(model_type="kimi_k2", rope_theta=theta, rope_scaling={**rope, "type": kind})
    config.update(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    del config["head_dim"]


def test_kimi_k2s_own_config_is_read_as_deepseeks(paths, tmp_path):
    prompt = prompt_of(40, VOCAB, 2)
    path = edited(paths["kimi-k2"], tmp_path / "kimi", in_the_hubs_spelling)
    made = [make_engine(paths["kimi-k2"]), make_engine(path)]
    first, second = (add(each.engine, "a", prompt, **TARGET)[0] for each in made)
    for each in made:
        run(each.engine)
    assert stream_of(first) == stream_of(second)


def test_layers_that_predict_further_tokens_are_not_loaded(paths, tmp_path):
    path = edited(paths["glm4.5"], tmp_path / "shorter", lambda config: config.update(num_hidden_layers=2))
    assert not any(name.startswith("model.layers.2.") for name in make_engine(path).store.names)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek-v3", {"n_group": 5}, "of 5 groups"),
        ("deepseek-v3", {"n_routed_experts": 15, "n_group": 1, "topk_group": 1}, "experts.15|gate"),
        ("glm4.5", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("qwen3-moe", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "needs original_max_position"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(paths, tmp_path, name, change, message):
    path = edited(paths[name], tmp_path / "model", lambda config: config.update(change))
    with pytest.raises(ConfigError, match=message):
        make_engine(path)
