"""The dense families against Hugging Face in float64: logits, greedy tokens, log-probs, weights there and back."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from colloid.engines.embedded.model_config import load_model_config
from colloid.engines.embedded.weights import tensor_checksum
from colloid.errors import ConfigError
from tests.engine.models import VARIANTS, add, make_engine, prompt_of, run

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request, model_paths):
    path = model_paths[request.param]
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).double().eval()
    return make_engine(path), reference, path


def reference_logits(reference, ids) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([list(ids)])).logits[0]


@pytest.mark.parametrize("length", [1, 33, 90, 700])
def test_logits_are_within_2e5_of_the_largest_logit(case, length):
    made, reference, _ = case
    prompt = prompt_of(length, 500, length)
    (sequence,) = add(made.engine, "a", prompt, max_new_tokens=2)
    expected = reference_logits(reference, prompt)[-1]
    prefix = None
    while prefix is None or not prefix.is_ready:
        made.engine.step()
        prefix = sequence.prefix
    assert (prefix.next_logits - expected).abs().max() < 2e-5 * expected.abs().max()
    run(made.engine)


def test_greedy_output_is_that_of_generate_and_log_probs_that_of_a_teacher_forced_pass(case):
    made, reference, _ = case
    prompt = prompt_of(45, 500, 3)
    greedy, drawn = (
        add(made.engine, f"t{t}", prompt, max_new_tokens=48, temperature=t, ignore_eos=True, sampling_seed=1)[0]
        for t in (0.0, 0.7)
    )
    run(made.engine)
    ids = torch.tensor([prompt])
    expected = reference.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy.output_ids == expected[0, len(prompt) :].tolist()
    for sequence, temperature in ((greedy, 1.0), (drawn, 0.7)):
        logits = reference_logits(reference, [*prompt, *sequence.output_ids])[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(sequence.output_ids)[:, None])
        assert (expected[:, 0] - torch.tensor(sequence.log_probs)).abs().max() < 2e-5


def test_weights_are_unpacked_exactly_as_they_came(case):
    made, _, path = case
    stored = load_file(path / "model.safetensors")
    assert made.store.checksums() == {name: tensor_checksum(tensor) for name, tensor in stored.items()}


def test_bfloat16_stays_near_float32(model_paths):
    path = model_paths["qwen3-untied"]
    low, high = make_engine(path, torch.bfloat16), make_engine(path)
    prompt = prompt_of(150, 500, 5)
    logits = []
    for made in (low, high):
        (sequence,) = add(made.engine, "a", prompt, max_new_tokens=2)
        made.engine.step()
        logits.append(sequence.prefix.next_logits)
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[1].abs().max()


def test_end_of_sequence_ids_come_from_the_config_and_the_generation_config(model_paths):
    assert load_model_config(model_paths["qwen2-tied"]).eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ({"intermediate_size": 7}, "down_proj|gate_proj"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(model_paths, tmp_path, change, message):
    import json
    import shutil

    path = shutil.copytree(model_paths["llama-gqa-tied"], tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=message):
        make_engine(path)
