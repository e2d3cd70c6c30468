"""Replayed experts, the engine's and those of the first log-probs, in every layout of the ranks and under recompute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from colloid.data.routing import RoutingShape
from colloid.data.sample import Sample
from colloid.rollout.generate_sample import record_answer, record_routing
from tests.parallel import routing_cases
from tests.parallel.engine import embedded_engines
from tests.parallel.family_models import LAYERS, VOCAB, hf_model, make_family
from tests.parallel.ranks import run_ranks
from tests.parallel.rollouts import TEMPERATURE

pytestmark = pytest.mark.timeout(300)

ENGINE = {"use_rollout_routing_replay": True}
TRAINER = {"use_routing_replay": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": "moe"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
INTERLEAVED = PP2 | {"num_layers_per_virtual_pipeline_stage": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 SP": TP2,
    "PP2, full recompute": PP2 | FULL,
    "PP2 interleaved, full recompute": INTERLEAVED | FULL,
    "EP2": EP2,
    "CP2": {"context_parallel_size": 2},
    "TP2 SP EP2, recompute of experts": TP2 | SELECTIVE | EP2 | {"expert_tensor_parallel_size": 1},
    "DP2": {"use_distributed_optimizer": True},
}
"""Of two ranks."""
ALONE: dict[str, dict[str, Any]] = {"one rank": {}, "full recompute": FULL, "recompute of experts": SELECTIVE}
MODEL = "qwen3_moe"
CHOSEN = (8, 3)
"""Experts of a layer, and chosen a token, of `MODEL`."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {name: make_family(place / name, name) for name in (MODEL, "glm4_moe", "deepseek_v3")}


@pytest.fixture(scope="module")
def layouts(models, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Of `routing_cases.one_layout`, on rank 0, by layout and who chose."""
    runs = []
    for size, group in ((1, ALONE), (2, LAYOUTS)):
        for name, options in group.items():
            for who, replay in (("engine", ENGINE), ("trainer", TRAINER)):
                experts = CHOSEN if who == "engine" else None
                given = {"model": models[MODEL], "options": options | replay, "experts": experts}
                runs.append((f"{name}: {who}", size, given))
    plain = {"model": models[MODEL], "options": {}, "experts": None}
    runs.append(("one rank: nobody", 1, plain))
    return run_ranks(routing_cases.layouts, 2, tmp_path_factory.mktemp("layouts"), timeout=250, runs=runs)[0]


@pytest.mark.parametrize("who", ["engine", "trainer"])
@pytest.mark.parametrize("name", [*LAYOUTS, *list(ALONE)[1:]])
def test_it_trains_as_on_one_rank_without_recompute(layouts, name, who):
    wanted, found = layouts[f"one rank: {who}"], layouts[f"{name}: {who}"]
    assert found["copies agree"]
    for step in (0, 1):
        for metric in ("loss", "entropy_loss", "grad_norm"):
            key = f"train/step_{step}/{metric}"
            assert found["metrics"][key] == pytest.approx(wanted["metrics"][key], rel=1e-4), key
    if who == "engine":
        scale = max(np.abs(tensor).max() for tensor in wanted["gradients"].values())
        for key, tensor in wanted["gradients"].items():
            assert np.abs(found["gradients"][key] - tensor).max() < 1e-5 * scale, key


def test_routers_have_gradients_and_experts_that_none_chose_change_the_result(layouts):
    own, replayed = layouts["one rank: nobody"], layouts["one rank: engine"]
    for result in (own, replayed):
        for layer in range(1, LAYERS):
            assert np.abs(result["gradients"][f"model.layers.{layer}.mlp.gate.weight"]).max() > 1e-6
    entropy = "train/step_0/entropy_loss"
    assert abs(own["metrics"][entropy] - replayed["metrics"][entropy]) > 1e-4


def test_the_trainers_replay_changes_the_second_step_of_a_rollout_and_not_the_first(layouts):
    own, noted = layouts["one rank: nobody"]["metrics"], layouts["one rank: trainer"]["metrics"]
    assert own["train/step_0/loss"] == noted["train/step_0/loss"]
    assert abs(own["train/step_1/entropy_loss"] - noted["train/step_1/entropy_loss"]) > 1e-4


def altered(model: Path, place: Path) -> Path:
    """The model with other biases in its routers: they choose other experts and weigh them as before."""
    place.mkdir()
    for file in model.iterdir():
        if file.name != "model.safetensors" and file.is_file():
            (place / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


def generated(url: str, shape: RoutingShape) -> list[Sample]:
    """Eight samples: four prompts twice, so that prompts are shared; the last ones have two turns."""

    def ask(sample: Sample, length: int) -> None:
        sampling = {"temperature": TEMPERATURE, "max_new_tokens": length, "ignore_eos": True}
        body = {"input_ids": sample.tokens, "sampling_params": sampling, "return_logprob": True}
        body["return_routed_experts"] = True
        answer = requests.post(f"{url}/generate", json=body, headers={"Authorization": "Bearer key"}, timeout=30).json()
        record_answer(sample, answer)
        record_routing(sample, answer, shape)
        assert sample.rollout_routed_experts.shape[0] == len(sample.tokens) - 1

    samples = []
    for index in range(8):
        prompt = np.random.default_rng(index // 2).integers(0, VOCAB, 40 + index // 2).tolist()
        sample = Sample(index=index, group_index=index // 2, tokens=prompt, reward=float(index % 2))
        ask(sample, 5 + index)
        if index >= 6:
            sample.append_response_tokens([3, 4, 5], trained=False)
            ask(sample, 6)
            sample.append_response_tokens([6, 7], trained=False)
        samples.append(sample)
    return samples


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory) -> dict[str, Any]:
    """Of `routing_cases.alone`: what is computed on one rank."""
    place, engines = tmp_path_factory.mktemp("engines"), {}
    with embedded_engines(models, place, "--enable-return-routed-experts") as urls:
        for name, model in models.items():
            num_chosen = json.loads((model / "config.json").read_text())["num_experts_per_tok"]
            samples = generated(urls[name], RoutingShape(LAYERS, num_chosen, num_experts=16))
            runs = {f"{name}, replay": (model, ENGINE)}
            if name != MODEL:
                other = altered(model, place / f"{name}_altered")
                runs |= {f"{name}, altered": (other, {}), f"{name}, altered, replay": (other, ENGINE)}
                runs[f"{name}, altered, replay, recompute"] = (other, ENGINE | FULL)
            engines[name] = {"samples": samples, "runs": runs}
    choosing = {"replay": TRAINER, "replay, recompute": TRAINER | FULL, "own": {}}
    choosing["engine's log-probs"] = TRAINER | {"use_rollout_logprobs": True}
    given = {
        "choices": {"model": models["glm4_moe"], "runs": choosing},
        "with_engines": {"models": engines},
        "log_probs": {"model": models[MODEL], "experts": CHOSEN},
    }
    return run_ranks(routing_cases.alone, 1, tmp_path_factory.mktemp("alone"), **given)[0]


# ---- the experts of the log-probs before the first step


def by_pass(calls: list[tuple[int, np.ndarray]], recompute: bool = False) -> list[list[np.ndarray]]:
    """The routers' choices before the first step (of the second step's samples), in the first step, and in the second;
    a recomputed forward of a step comes once more.
    """
    per_forward = LAYERS - 1  # The first layer is dense.
    forwards = [calls[row : row + per_forward] for row in range(0, len(calls), per_forward)]
    if recompute:
        # Each training micro-batch: its layers, then the same ones from the last to the first.
        before = len(forwards) // 5
        trained = forwards[before:]
        for forward, again in zip(trained[::2], trained[1::2], strict=True):
            for (layer, first), (other, second) in zip(forward, again[::-1], strict=True):
                assert layer == other and np.array_equal(first, second)
        forwards = forwards[:before] + trained[::2]
    count = len(forwards) // 3
    return [
        [choice for forward in forwards[row : row + count] for _, choice in forward] for row in (0, count, 2 * count)
    ]


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["replay", "replay, recompute"])
def test_the_second_steps_experts_are_those_recorded_before_the_first(alone, name):
    before, _, second = by_pass(alone["choices"][name], recompute="recompute" in name)
    assert same(before, second)


def test_without_replay_the_second_step_chooses_otherwise(alone):
    before, _, second = by_pass(alone["choices"]["own"])
    assert not same(before, second)


def test_experts_are_recorded_where_the_loss_itself_needs_no_log_probs_beforehand(alone):
    before, _, second = by_pass(alone["choices"]["engine's log-probs"])
    assert same(before, second)


# ---- the engine's experts


DIFFERENCE = "train/train_rollout_logprob_abs_diff"


@pytest.mark.parametrize("name", [MODEL, "glm4_moe", "deepseek_v3"])
def test_with_the_engines_experts_the_trainers_log_probs_are_the_engines(alone, name):
    found = alone["with_engines"]
    assert found[f"{name}, replay"]["metrics"][DIFFERENCE] < 1e-5


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_even_where_its_routers_would_choose_others(alone, name):
    found = alone["with_engines"]
    assert found[f"{name}, altered"]["metrics"][DIFFERENCE] > 1e-3
    for recompute in ("", ", recompute"):
        assert found[f"{name}, altered, replay{recompute}"]["metrics"][DIFFERENCE] < 1e-5
    gradients = found[f"{name}, altered, replay"]["gradients"]
    wanted = found[f"{name}, replay"]["gradients"]
    scale = max(np.abs(tensor).max() for tensor in wanted.values())
    for key, tensor in wanted.items():
        assert np.abs(gradients[key] - tensor).max() < 1e-5 * scale, key


# ---- softmax routers


def test_the_weights_of_replayed_experts_are_the_current_routers(models, alone):
    """Against transformers, told the same experts: the softmax over all, of the chosen ones, made to sum to 1."""
    batch, log_probs = alone["log_probs"]
    model, forced = hf_model(models[MODEL]), {}

    def choose(layer: int):
        def hook(module: torch.nn.Module, inputs: tuple, output: tuple) -> tuple:
            own, experts = output[2], torch.from_numpy(forced[layer].astype(np.int64))
            chosen = torch.where(experts < 0, own, experts)
            weights = torch.softmax(inputs[0] @ module.weight.T, -1).gather(1, chosen)
            return output[0], weights / weights.sum(-1, keepdim=True), chosen

        return hook

    for layer in range(1, LAYERS):
        model.model.layers[layer].mlp.gate.register_forward_hook(choose(layer))
    for row in range(batch.num_samples):
        tokens = slice(batch.offsets[row], batch.offsets[row + 1])
        response = slice(batch.response_offsets[row], batch.response_offsets[row + 1])
        for layer in range(1, LAYERS):
            forced[layer] = batch.routed_experts[tokens, layer]
        ids = torch.from_numpy(batch.tokens[tokens].astype(np.int64))
        with torch.inference_mode():
            logits = model(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE
        count = response.stop - response.start
        wanted = logits[-count - 1 : -1].log_softmax(-1).gather(1, ids[-count:, None])[:, 0]
        assert (log_probs[response] - wanted).abs().max() < 1e-5
