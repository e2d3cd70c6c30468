"""The table of models, the scripts made from it, and the derivation from a `config.json`: each checks the others.

`reference_models.json` holds the arguments that model scripts of this field have; `hf_configs/` what the published
`config.json` of each model says of its architecture.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from colloid.config.tokens import parse_tokens
from colloid.errors import ConfigError
from colloid.models.derive import model_arguments
from colloid.models.facts import MODELS, command_line
from colloid.models.families import FAMILIES, NOT_BUILT, SPECS, SUPPORTED_FAMILIES, family_name, unsupported

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
CORRECTED = {
    "qwen2.5-1.5B": {"--rotary-base": ("10000", "1000000")},
    "glm4-32B": {"--num-layers": ("64", "61"), "--num-query-groups": ("8", "2")},
}
"""Where the reference contradicts the published config (10000 is Qwen2.5-Math's; GLM-4-32B-0414 has 61 layers and 2
groups, which make its 32.57 billion parameters): reference, published."""

NAMED = """
glm4.5-355B-A32B glm4.5-106B-A12B glm4.6-355B-A32B glm4.7-355B-A32B glm4.7-30B-A3B glm4-9B glm4-32B glm-z1-9B
qwen3-0.6B qwen3-1.7B qwen3-4B qwen3-8B qwen3-14B qwen3-32B qwen3-30B-A3B qwen3-235B-A22B
qwen2.5-0.5B qwen2.5-1.5B qwen2.5-3B qwen2.5-7B qwen2.5-32B deepseek-v3 deepseek-v3.1 deepseek-r1
llama3-8B llama3-70B llama3.1-8B-Instruct llama3.2-3B-Instruct kimi-k2 moonlight smollm2-135M
"""


@cache
def reference() -> dict[str, dict]:
    return json.loads((DATA / "reference_models.json").read_text())


@cache
def published(name: str) -> dict:
    return json.loads((DATA / "hf_configs" / f"{name}.json").read_text())


def words(flags: dict) -> list[str]:
    line: list[str] = []
    for flag, value in flags.items():
        line += [flag, *([] if value is True else value if isinstance(value, list) else [value])]
    return line


def test_all_named_models_are_there_with_their_configs():
    assert set(NAMED.split()) <= MODELS.keys()
    assert {path.stem for path in (DATA / "hf_configs").glob("*.json")} == MODELS.keys()


def test_the_scripts_are_what_the_table_says():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "make_model_scripts.py", "--check"], capture_output=True)
    assert done.returncode == 0, done.stdout
    assert {path.stem for path in (ROOT / "scripts" / "models").glob("*.sh")} == MODELS.keys()


def test_the_shell_reads_the_scripts_as_the_table_says(tmp_path):
    lines = "; ".join(f'source {ROOT}/scripts/models/{name}.sh; echo "${{MODEL_ARGS[@]}}"' for name in MODELS)
    done = subprocess.run(
        ["bash", "-euc", lines], cwd=tmp_path, capture_output=True, text=True, env={"HF_CHECKPOINT": "here"}
    )
    assert done.returncode == 0, done.stderr
    expected = [" ".join(["--hf-checkpoint", "here", *command_line(name)]) for name in MODELS]
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize("name", sorted(MODELS.keys() & reference().keys()))
def test_the_table_holds_all_that_the_reference_says(name):
    theirs = {flag: value for flag, value in reference()[name].items() if flag != "--spec"}
    for flag, (before, after) in CORRECTED.get(name, {}).items():
        assert theirs[flag] == before
        theirs[flag] = after
    wanted, ours = parse_tokens(words(theirs)), parse_tokens(command_line(name))
    assert {dest: ours.get(dest) for dest in wanted} == wanted


@pytest.mark.parametrize("name", sorted(reference()))
def test_the_arguments_of_the_reference_parse_and_its_specs_are_known(name):
    flags = reference()[name]
    assert parse_tokens(words(flags))["hidden_size"] == int(flags["--hidden-size"])
    if "--spec" in flags:
        family = SPECS[" ".join(flags["--spec"])]
        assert family in NOT_BUILT or family == MODELS[name].family


@pytest.mark.parametrize("name", sorted(MODELS))
def test_script_and_derivation_agree(name):
    config = published(name)
    given, derived = parse_tokens(command_line(name)), model_arguments(config)
    assert {dest: derived[dest] for dest in derived.keys() & given} == {
        dest: value for dest, value in given.items() if dest in derived
    }
    assert family_name(config) == MODELS[name].family
    assert unsupported(config) == []
    # The rest are choices of the user's, or without meaning for the model.
    choices = {"add_position_embedding", "use_rotary_position_embeddings", "apply_rope_fusion", "masked_softmax_fusion"}
    choices |= {"attention_softmax_in_fp32", "make_vocab_size_divisible_by", "seq_length"}
    choices |= {"moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_router_bias_update_rate"}
    choices |= {"moe_grouped_gemm", "moe_permute_fusion", "moe_token_dispatcher_type", "moe_token_drop_policy"}
    choices |= {"moe_router_dtype"} | ({"moe_router_pre_softmax"} if "n_routed_experts" in config else set())
    latent = {"kv_channels", "add_qkv_bias", "mscale", "mscale_all_dim"}
    apart = given.keys() - derived.keys() - choices
    assert apart <= (latent if derived["multi_latent_attention"] else {"rotary_scaling_factor"})


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_a_script_leaves_out_is_megatrons_default(name):
    """A fact that is not its default stands in the script: it is complete for a plan without the model."""
    given, derived = parse_tokens(command_line(name)), model_arguments(published(name))
    silent = {dest: value for dest, value in derived.items() if dest not in given and value not in (None, False)}
    follows = {"max_position_embeddings", "position_embedding_type", "rotary_percent", "rope_scaling_factor"}
    follows |= {"kv_channels", "num_query_groups", "rope_type", "original_max_position_embeddings"}
    follows |= {"beta_fast", "beta_slow", "moe_router_num_groups", "moe_router_group_topk", "rotary_scaling_factor"}
    assert silent.keys() <= follows, silent


def test_the_first_dense_layers_and_the_latents_of_deepseek():
    facts = model_arguments(published("deepseek-v3"))
    assert facts["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert (facts["num_experts"], facts["moe_router_num_groups"], facts["moe_router_group_topk"]) == (256, 8, 4)
    assert (facts["q_lora_rank"], facts["kv_lora_rank"], facts["v_head_dim"]) == (1536, 512, 128)
    assert (facts["rope_type"], facts["rotary_scaling_factor"], facts["mscale_all_dim"]) == ("yarn", 40.0, 1.0)
    assert (facts["beta_fast"], facts["original_max_position_embeddings"]) == (32.0, 4096)
    assert "kv_channels" not in facts and "num_query_groups" not in facts
    assert model_arguments(published("kimi-k2"))["beta_fast"] == 1.0


def test_moonlight_has_no_latent_of_queries_and_plain_rope():
    facts = model_arguments(published("moonlight"))
    assert facts["q_lora_rank"] is None and "mscale_all_dim" not in facts
    assert (facts["rope_type"], facts["rotary_scaling_factor"]) == ("rope", 1.0)
    assert facts["moe_shared_expert_intermediate_size"] == 2 * 1408


def test_layers_with_experts_in_every_spelling():
    qwen = published("qwen3-30B-A3B") | {"num_hidden_layers": 6}
    assert model_arguments(qwen)["moe_layer_freq"] == [1] * 6
    assert model_arguments(qwen | {"mlp_only_layers": [0, 3]})["moe_layer_freq"] == [0, 1, 1, 0, 1, 1]
    assert model_arguments(qwen | {"decoder_sparse_step": 2})["moe_layer_freq"] == [0, 1, 0, 1, 0, 1]
    lite = published("glm4.7-30B-A3B") | {"num_hidden_layers": 3}
    types = {key: value for key, value in lite.items() if key != "first_k_dense_replace"}
    assert model_arguments(types)["moe_layer_freq"] == [0, 1, 1]
    assert model_arguments(types | {"mlp_layer_types": ["dense", "dense", "sparse"]})["moe_layer_freq"] == [0, 0, 1]


def test_a_softmax_router_that_does_not_normalise_is_softmax_first():
    qwen = published("qwen3-30B-A3B")
    assert model_arguments(qwen)["moe_router_pre_softmax"] is False
    assert model_arguments(qwen | {"norm_topk_prob": False})["moe_router_pre_softmax"] is True


@pytest.mark.parametrize("low,high,original", [(1.0, 4.0, 8192), (1.5, 8.0, 4096)])
def test_the_rope_scaling_of_llama_may_have_any_values(low, high, original):
    rope = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": low, "high_freq_factor": high}
    config = published("llama3-8B") | {"rope_scaling": rope | {"original_max_position_embeddings": original}}
    assert unsupported(config) == []
    assert model_arguments(config)["rope_scaling_factor"] == 16.0


@pytest.mark.parametrize(
    "name,changes,word",
    [
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek-v3", {"topk_group": 2}, "best 4"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "softmax"),
        ("deepseek-v3", {"topk_method": "greedy"}, "greedy"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek-v3", {"n_group": 7}, "does not divide"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}, "convert them to bfloat16"),
        ("moonlight", {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ("qwen3-30B-A3B", {"attention_bias": True}, "attention_bias"),
        ("qwen3-8B", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ("llama3-8B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama3-8B", {"mlp_bias": True}, "mlp_bias"),
        ("glm4-9B", {"hidden_act": "gelu"}, "gelu"),
        ("qwen3-8B", {"model_type": "qwen3_next"}, "linear attention"),
        ("qwen3-8B", {"model_type": "glm_moe_dsa"}, "sparse attention"),
        ("qwen3-8B", {"model_type": "gpt2"}, "kimi_k2"),
    ],
)
def test_what_does_not_work_is_refused_with_the_reason(name, changes, word):
    assert word in " ".join(unsupported(published(name) | changes))


def test_a_config_that_lacks_a_number_is_an_error_that_names_it():
    config = published("deepseek-v3")
    for key in ("kv_lora_rank", "moe_intermediate_size", "num_experts_per_tok", "hidden_size", "first_k_dense_replace"):
        with pytest.raises(ConfigError, match=key):
            model_arguments({name: value for name, value in config.items() if name != key})


def test_the_page_on_models_names_them_all():
    page = (ROOT / "docs" / "models.md").read_text()
    assert all(f"| `{name}` | {model.checkpoint.split('$')[0]}" in page for name, model in MODELS.items())
    assert all(f"| `{family}` |" in page for family in SUPPORTED_FAMILIES)


def test_every_family_has_a_model():
    assert {model.family for model in MODELS.values()} == FAMILIES.keys() >= set(SUPPORTED_FAMILIES)


@pytest.mark.parametrize("name", ["qwen3-30B-A3B", "glm4-9B", "glm4.5-106B-A12B", "moonlight", "glm4.7-30B-A3B"])
def test_configs_that_transformers_writes_say_the_same(name, tmp_path):
    """transformers 5 renames keys: `num_local_experts`, `rope_parameters`, `mlp_layer_types`."""
    import transformers

    config = published(name)
    shape = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    transformers.AutoConfig.for_model(config["model_type"], **shape).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.keys() != config.keys()
    assert model_arguments(written) == model_arguments(config)
    assert unsupported(written) == []
