"""`return_routed_experts`: the experts that the engine says are those that transformers' routers choose."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from colloid.engines.contract_fields import BadRequest
from colloid.engines.contract_generate import GenerateInput, GenerateRequest, SamplingParams
from colloid.engines.embedded.request import Sequence
from tests.engine.families import make_family
from tests.engine.models import make_engine, prompt_of, run

pytestmark = pytest.mark.timeout(60)
VOCAB = 500
NAMES = ["qwen3-moe", "glm4.5", "deepseek-v3"]
ON = {"record_experts": True}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    base = tmp_path_factory.mktemp("families")
    return {name: make_family(name, base / name) for name in NAMES}


@pytest.fixture(scope="module", params=NAMES)
def case(request, paths):
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(paths[request.param], dtype=torch.float32, **eager)
    return make_engine(paths[request.param], **ON), reference.eval()


def ask(engine, rid: str, prompt, *, n: int = 1, tokens: int = 12, wanted: bool = True) -> list[Sequence]:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, sampling_seed=5, n=n)
    request = GenerateInput(tuple(prompt), None, params, rid, True, return_routed_experts=wanted)
    sequences = engine.make_sequences(request, request.input_ids, lambda sequence: None, stream=False)
    engine.add(sequences)
    return sequences


def chosen_by(reference, ids: list[int]) -> dict[int, np.ndarray]:
    """Layer -> experts [tokens, chosen], each token's in rising order."""
    found, handles = {}, []
    for index, layer in enumerate(reference.model.layers):
        if hasattr(layer.mlp, "experts"):
            keep = lambda _module, inputs, index=index: found.update({index: inputs[1].sort(-1)[0].numpy()})  # noqa: E731
            handles.append(layer.mlp.experts.register_forward_pre_hook(keep))
    with torch.inference_mode():
        reference(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found


def check(reference, sequence: Sequence) -> None:
    experts = sequence.routed_experts()
    ids = [*sequence.prompt_ids, *sequence.output_ids]
    assert experts.dtype == np.int32 and experts.shape[0] == len(ids) - 1
    expected = chosen_by(reference, ids[:-1])
    assert expected
    for layer in range(experts.shape[1]):
        if layer in expected:
            # A tie in float32 may go either way.
            differing = (np.sort(experts[:, layer], -1) != expected[layer]).any(-1).sum()
            assert differing <= len(ids) // 100, (layer, differing)
        else:
            assert not experts[:, layer].any()


def test_they_are_those_of_transformers_in_prompt_and_output(case):
    made, reference = case
    (sequence,) = ask(made.engine, "a", prompt_of(45, VOCAB, 3))
    run(made.engine)
    check(reference, sequence)


def test_samples_that_share_a_prompt_have_its_experts_too(case):
    """n samples of one request, later ones that join the cached prompt, a long prompt in chunks, all in one batch."""
    made, reference = case
    long, short = prompt_of(600, VOCAB, 4), prompt_of(70, VOCAB, 5)
    sequences = [*ask(made.engine, "n", short, n=3), *ask(made.engine, "long", long, n=2)]
    while not sequences[0].output_ids:
        made.engine.step()
    sequences += ask(made.engine, "late", short, tokens=5)
    run(made.engine)
    assert sequences[-1].cached_tokens == len(short)
    for sequence in (sequences[0], sequences[2], sequences[4], sequences[-1]):
        check(reference, sequence)


def test_what_is_computed_anew_after_a_retraction_is_what_is_told(case):
    made, reference = case
    retracted = ask(made.engine, "r", prompt_of(40, VOCAB, 6), n=2)
    while len(retracted[0].output_ids) < 5:
        made.engine.step()
    made.engine.retract()
    run(made.engine)
    for sequence in retracted:
        assert len(sequence.output_ids) == 12
        check(reference, sequence)


def test_an_aborted_sample_has_the_experts_of_what_it_got(case):
    made, reference = case
    (sequence,) = ask(made.engine, "x", prompt_of(30, VOCAB, 7))
    while len(sequence.output_ids) < 4:
        made.engine.step()
    made.engine.abort("x")
    check(reference, sequence)
    (waiting,) = ask(made.engine, "y", prompt_of(30, VOCAB, 8))
    made.engine.abort("y")
    assert waiting.routed_experts() is None


def test_recording_changes_no_token_and_no_log_prob(paths):
    results = []
    for options in ({}, ON):
        engine = make_engine(paths["deepseek-v3"], **options).engine
        sequences = ask(engine, "a", prompt_of(33, VOCAB, 9), n=3, wanted=False)
        run(engine)
        results.append([(sequence.output_ids, sequence.log_probs) for sequence in sequences])
    assert results[0] == results[1]


def test_a_request_for_what_is_not_recorded_is_refused(paths, model_paths):
    with pytest.raises(BadRequest, match="--enable-return-routed-experts"):
        ask(make_engine(paths["qwen3-moe"]).engine, "a", [5, 6])
    dense = next(path for name, path in model_paths.items() if "qwen3" in name)
    with pytest.raises(BadRequest, match="the model has no experts"):
        ask(make_engine(dense, **ON).engine, "a", [5, 6])
    with pytest.raises(BadRequest, match="return_routed_experts must be true or false"):
        GenerateRequest.from_json({"input_ids": [1], "return_routed_experts": "yes"})
