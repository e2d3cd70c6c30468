"""Runs with every model: the options are accepted, and Megatron is given what it needs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import colloid.training.megatron  # noqa: F401  (it must come before megatron.core, in whatever process)
from colloid.config import parse
from colloid.config.megatron_fields import transformer_fields
from colloid.errors import ConfigError
from colloid.models import families
from colloid.models.facts import MODELS, command_line

DATA = Path(__file__).resolve().parents[1] / "data"
GLM4_SPEC = ("--spec", "slime_plugins.models.glm4", "get_glm_spec")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working directory with data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    return tmp_path


def run(name: str, *argv: str, **changes):
    """The options of a run with a model of which only `config.json` is there."""
    config = json.loads((DATA / "hf_configs" / f"{name}.json").read_text()) | changes
    Path(name).mkdir(exist_ok=True)
    (Path(name) / "config.json").write_text(json.dumps(config))
    return parse(["--prompt-data", "data.jsonl", "--hf-checkpoint", name, "--device", "cpu", *argv])


def error_of(name: str, *argv: str, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        run(name, *argv, **changes)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_run_takes_the_script_of_every_model_and_says_the_same_without_it(place, name):
    bare, scripted = run(name), run(name, *command_line(name))
    assert scripted.derived == bare.derived
    facts = bare.derived & bare.as_dict().keys()
    assert scripted.as_dict(only=facts) == bare.as_dict(only=facts)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_plan_takes_the_script_of_every_model_without_the_model(place, name):
    args = parse(["--hf-checkpoint", "Nobody/Nothing", *command_line(name), "--dry-run", "--device", "cpu"])
    assert args.hidden_size == MODELS[name].flags["--hidden-size"]


@pytest.mark.parametrize("name", ["qwen3-30B-A3B", "glm4.5-106B-A12B", "deepseek-v3", "moonlight", "glm4.7-30B-A3B"])
@pytest.mark.parametrize("scripted", [False, True])
def test_megatron_core_accepts_the_fields_of_every_mixture_of_experts(place, name, scripted):
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    args = run(name, *(command_line(name) if scripted else []))
    latent = args.multi_latent_attention
    fields = transformer_fields(args) | {"apply_rope_fusion": False, "num_attention_heads": args.num_attention_heads}
    config = (MLATransformerConfig if latent else TransformerConfig)(**fields)
    assert (config.num_moe_experts, config.moe_layer_freq) == (args.num_experts, args.moe_layer_freq)
    assert isinstance(config.moe_layer_freq, list) and len(config.moe_layer_freq) == args.num_layers
    assert config.moe_aux_loss_coeff == 0 and config.moe_router_bias_update_rate == 0
    assert config.moe_token_dispatcher_type == "alltoall" and config.moe_router_dtype == "fp32"
    assert not config.moe_grouped_gemm and not config.moe_permute_fusion
    assert config.moe_router_load_balancing_type == ("none" if not scripted or "qwen3" in name else "seq_aux_loss")
    if latent:
        assert config.q_lora_rank == args.hf_config["q_lora_rank"]
        assert config.rotary_scaling_factor == (40.0 if name == "deepseek-v3" else 1.0)
        assert config.rope_type == ("yarn" if name == "deepseek-v3" else "rope")


def test_a_dense_model_is_given_nothing_of_latents(place):
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name in ("qwen3-8B", "llama3.1-8B-Instruct", "glm4-9B"):
        fields = transformer_fields(run(name, *command_line(name)))
        assert fields.keys() <= known and not fields.get("num_moe_experts")


@pytest.mark.parametrize(
    ("name", "argv", "words"),
    [
        ("qwen3-30B-A3B", "--num-experts 64", ["--num-experts 64", "128"]),
        ("qwen3-8B", "--num-experts 64", ["--num-experts 64", "the model has none"]),
        ("deepseek-v3", "--moe-layer-freq [0]*1+[1]*60", ["[0]*1+[1]*60", "[0]*3+[1]*58"]),
        ("deepseek-v3", "--moe-layer-freq 1", ["[1]*61", "[0]*3+[1]*58"]),
        ("deepseek-v3", "--q-lora-rank 768", ["--q-lora-rank 768", "1536"]),
        ("moonlight", "--q-lora-rank 768", ["--q-lora-rank 768", "the model has none"]),
        ("kimi-k2", "--rotary-scaling-factor 40", ["--rotary-scaling-factor 40.0", "32.0"]),
        ("glm4.5-355B-A32B", "--moe-router-topk-scaling-factor 1.0", ["1.0", "2.5"]),
        ("glm4.5-106B-A12B", "--qk-layernorm", ["--qk-layernorm", "qk_layernorm=False"]),
        ("qwen3-8B", "--multi-latent-attention", ["--multi-latent-attention", "False"]),
        ("qwen3-8B", "--post-mlp-layernorm", ["--post-mlp-layernorm", "False"]),
        ("glm4-9B", "--rotary-percent 1.0", ["--rotary-percent 1.0", "0.5"]),
    ],
)
def test_a_mismatch_names_both_values(place, name, argv, words):
    message = error_of(name, *argv.split())
    assert all(word in message for word in words), message


def test_a_frequency_of_layers_with_experts_is_a_list_of_them(place):
    assert run("qwen3-30B-A3B", "--moe-layer-freq", "1").moe_layer_freq == [1] * 48


def test_what_needs_cuda_kernels_is_switched_off_on_cpu_with_one_warning(place):
    args = run("qwen3-30B-A3B", "--moe-grouped-gemm", "--moe-permute-fusion", "--moe-shared-expert-overlap")
    warned = [warning for warning in args.warnings if "--moe-" in warning]
    assert len(warned) == 1 and "--moe-grouped-gemm, --moe-permute-fusion, --moe-shared-expert-overlap" in warned[0]
    assert not (args.moe_grouped_gemm or args.moe_permute_fusion or args.moe_shared_expert_overlap)
    assert not [warning for warning in run("qwen3-30B-A3B").warnings if "--moe-" in warning]


@pytest.mark.parametrize(
    "argv",
    [
        "--moe-aux-loss-coeff 0.01",
        "--moe-router-bias-update-rate 0.001",
        "--moe-token-dispatcher-type flex",
        "--moe-router-load-balancing-type sinkhorn",
        "--moe-expert-capacity-factor 1.0",
        "--mtp-num-layers 1",
    ],
)
def test_what_the_trainer_would_do_and_the_engine_would_not_follow_is_refused(place, argv):
    message = error_of("qwen3-30B-A3B", *argv.split())
    assert "not supported" in message and argv in message


def test_specs_of_model_scripts_stand_for_a_family(place):
    assert run("glm4-9B", *command_line("glm4-9B"), *GLM4_SPEC).model_type == "glm4"
    assert "'glm4'" in error_of("qwen3-8B", *GLM4_SPEC) and "'qwen3'" in error_of("qwen3-8B", *GLM4_SPEC)
    next_spec = ("--spec", "slime_plugins.models.qwen3_next", "get_qwen3_next_spec")
    assert "linear attention" in error_of("qwen3-8B", *next_spec)
    assert "leave it out" in error_of("qwen3-8B", "--spec", "mine.py", "get")


@pytest.mark.parametrize("model_type", sorted(families.NOT_BUILT))
def test_families_that_are_not_built_are_refused_with_the_reason(place, model_type):
    message = error_of("qwen3-8B", model_type=model_type)
    assert model_type in message and families.NOT_BUILT[model_type] in message


def test_a_family_is_switched_off_in_one_place(place, monkeypatch):
    monkeypatch.setattr(families, "SUPPORTED_FAMILIES", ("llama",))
    for name in ("kimi-k2", "qwen3-30B-A3B", "glm4-9B"):
        assert "not supported yet" in error_of(name)


def test_another_model_as_reference_is_refused_with_both_values(place):
    run("deepseek-v3"), run("kimi-k2")
    message = error_of("deepseek-v3", "--ref-load", "kimi-k2")
    assert "num_experts is 384 and 256" in message and "[0]*1+[1]*60 and [0]*3+[1]*58" in message


def test_the_name_of_the_family_is_compared_with_the_model(place):
    for name in ("qwen3_moe", "Qwen3-MoE", "qwen3moe", "Qwen3MoeConfig"):
        run("qwen3-30B-A3B", "--model-name", name)
    run("kimi-k2", "--model-name", "deepseekv3")
    assert "'deepseek_v3'" in error_of("qwen3-30B-A3B", "--model-name", "deepseekv3")
    assert "no such family" in error_of("qwen3-30B-A3B", "--model-name", "qwen33")


def test_the_padded_vocabulary_holds_the_vocabulary_and_is_divided_evenly(place):
    run("qwen3-8B", "--padded-vocab-size", "200000")
    assert "less than the model's vocabulary" in error_of("qwen3-8B", "--padded-vocab-size", "1000")
    parallel = ("--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "2")
    assert "no multiple" in error_of("qwen3-8B", "--padded-vocab-size", "200001", *parallel)
    both = ("--padded-vocab-size", "200000", "--make-vocab-size-divisible-by", "64")
    assert "say the same" in error_of("qwen3-8B", *both)
