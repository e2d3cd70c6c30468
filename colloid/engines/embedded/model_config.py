"""The shape of a model, read from its Hugging Face `config.json`.

`FAMILIES` says what a family does where its config.json is silent; a new family is a row there. What a config asks for
and this engine cannot compute is an error here, before anything is loaded.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colloid.engines.embedded.rope import Rope, make_rope, rope_parameters, yarn_mscale
from colloid.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """What the model_type alone decides.

    qkv_bias: q, k and v have a bias in any case; otherwise attention_bias says. output_bias: attention_bias holds for
    o too. qk_norm: a norm on every q and k head ("config": as use_qk_norm says). latent: MLA. post_norms: norms also
    on the outputs of attention and MLP. fused_gate_up: one HF tensor for both. rotated_share: partial_rotary_factor
    where none is given. neighbours: RoPE rotates dimensions side by side (MLA: as rope_interleave says). scores: of
    the router, None without experts.
    """

    qkv_bias: bool = False
    output_bias: bool = True
    qk_norm: bool | str = False
    latent: bool = False
    post_norms: bool = False
    fused_gate_up: bool = False
    rotated_share: float = 1.0
    neighbours: bool = False
    scores: str | None = None


DEEPSEEK = Family(latent=True, scores="sigmoid")
FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, scores="softmax"),
    "glm4": Family(output_bias=False, post_norms=True, fused_gate_up=True, rotated_share=0.5, neighbours=True),
    "glm4_moe": Family(output_bias=False, qk_norm="config", rotated_share=0.5, scores="sigmoid"),
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
}
# Where a family's class has another default than False for attention_bias.
ATTENTION_BIAS = {"glm4": True}


@dataclass(frozen=True)
class LatentConfig:
    """MLA: widths of the latents of queries (None: queries come from x itself) and of keys and values."""

    q_rank: int | None
    kv_rank: int


@dataclass(frozen=True)
class ExpertsConfig:
    """Layers of experts. `scores`: "softmax", or "sigmoid" (with a bias that counts for the choice alone).

    shared_inner: width of the shared experts together, 0: none. Of num_groups groups of experts only those in the best
    num_groups_chosen can be chosen.
    """

    num_experts: int
    num_chosen: int
    inner: int
    shared_inner: int
    scores: str
    normalized: bool
    scaling: float
    num_groups: int
    num_groups_chosen: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model. `has_experts`: one entry a layer; `attention_scale` multiplies q·k."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    norm_epsilon: float
    max_position_embeddings: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    post_norms: bool
    fused_gate_up: bool
    eos_token_ids: tuple[int, ...]
    rope: Rope
    attention_scale: float
    latent: LatentConfig | None
    experts: ExpertsConfig | None
    has_experts: tuple[bool, ...]

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        return self.num_heads * self.key_dim, self.num_kv_heads * self.key_dim, self.num_kv_heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        return sum(self.qkv_widths)


def load_model_config(model_path: str | Path) -> ModelConfig:
    """Reads `config.json` (and `generation_config.json`, for the end-of-sequence ids). Raises ConfigError."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give the directory of a Hugging Face model")
    config = json.loads(path.read_text())
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{path}: model_type {model_type!r} is not supported by the embedded engine: {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(config, path)
    family = FAMILIES[model_type]
    attention_bias = config.get("attention_bias", ATTENTION_BIAS.get(model_type, False))
    num_layers = config["num_hidden_layers"]
    return ModelConfig(
        model_type=model_type,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=num_layers,
        norm_epsilon=config["rms_norm_eps"],
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        tied_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=family.output_bias and attention_bias,
        mlp_bias=config.get("mlp_bias", False),
        qk_norm=config.get("use_qk_norm", False) if family.qk_norm == "config" else family.qk_norm,
        post_norms=family.post_norms,
        fused_gate_up=family.fused_gate_up,
        eos_token_ids=_eos_token_ids(config, Path(model_path)),
        experts=_experts(config, family.scores, path) if family.scores else None,
        has_experts=_has_experts(config, num_layers) if family.scores else (False,) * num_layers,
        **(_latent_attention(config) if family.latent else _grouped_attention(config, family)),
    )


def _grouped_attention(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """The fields of ModelConfig on attention, for grouped queries."""
    num_heads, parameters = config["num_attention_heads"], rope_parameters(config)
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    share = parameters["partial_rotary_factor"] or family.rotated_share
    return {
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "key_dim": head_dim,
        "value_dim": head_dim,
        "rope": make_rope(parameters, int(head_dim * share), family.neighbours),
        "attention_scale": head_dim**-0.5,
        "latent": None,
    }


def _latent_attention(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig on attention, for MLA. mscale_all_dim of YaRN scales the softmax too."""
    num_heads, parameters = config["num_attention_heads"], rope_parameters(config)
    rotated, key_dim = config["qk_rope_head_dim"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if parameters["partial_rotary_factor"] not in (None, 1.0):
        raise ConfigError(f"partial_rotary_factor {parameters['partial_rotary_factor']} does not exist for MLA")
    rope = make_rope(parameters, rotated, config.get("rope_interleave", True))
    scale, mscale_all_dim = key_dim**-0.5, parameters.get("mscale_all_dim")
    if parameters["rope_type"] != "default" and mscale_all_dim:
        scale *= yarn_mscale(parameters["factor"], mscale_all_dim) ** 2
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "key_dim": key_dim,
        "value_dim": config["v_head_dim"],
        "rope": rope,
        "attention_scale": scale,
        "latent": LatentConfig(config.get("q_lora_rank"), config["kv_lora_rank"]),
    }


def _experts(config: dict[str, Any], scores: str, path: Path) -> ExpertsConfig:
    """Raises ConfigError where the groups don't fit the experts."""
    inner = config["moe_intermediate_size"]
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = ExpertsConfig(
        num_experts=next(config[name] for name in names if config.get(name) is not None),
        num_chosen=config["num_experts_per_tok"],
        inner=inner,
        shared_inner=inner * (config.get("n_shared_experts") or 0),
        scores=scores,
        normalized=config.get("norm_topk_prob", scores == "sigmoid"),
        scaling=config.get("routed_scaling_factor", 1.0),
        num_groups=config.get("n_group") or 1,
        num_groups_chosen=config.get("topk_group") or 1,
    )
    size = experts.num_experts // experts.num_groups
    if experts.num_experts % experts.num_groups or experts.num_groups_chosen * size < experts.num_chosen:
        raise ConfigError(
            f"{path}: {experts.num_chosen} of {experts.num_experts} experts cannot be chosen from "
            f"{experts.num_groups_chosen} of {experts.num_groups} groups (n_group, topk_group)"
        )
    return experts


def _has_experts(config: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts: mlp_layer_types, first_k_dense_replace, or Qwen's mlp_only_layers and step."""
    if config.get("mlp_layer_types"):
        return tuple(kind == "sparse" for kind in config["mlp_layer_types"])
    if config["model_type"] == "qwen3_moe":
        dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
        return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    return tuple(i >= config.get("first_k_dense_replace", 1) for i in range(num_layers))


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    sliding = config.get("use_sliding_window", False) and config.get("sliding_window")
    activation, scoring = config.get("hidden_act", "silu"), config.get("scoring_func", "sigmoid")
    quantization, frequency = config.get("quantization_config"), config.get("moe_layer_freq", 1)
    for name, value, wrong in (
        ("hidden_act", activation, activation != "silu"),
        ("use_sliding_window", sliding, bool(sliding)),
        ("quantization_config", quantization, quantization is not None),
        ("scoring_func", scoring, scoring != "sigmoid"),
        ("moe_layer_freq", frequency, frequency != 1),
    ):
        if wrong:
            raise ConfigError(f"{path}: {name} = {value!r} is not supported by the embedded engine")


def _eos_token_ids(config: dict[str, Any], directory: Path) -> tuple[int, ...]:
    """The ids of generation_config.json and config.json together; each may give one id or a list."""
    ids: list[int] = []
    generation_path = directory / "generation_config.json"
    generation = json.loads(generation_path.read_text()) if generation_path.is_file() else {}
    for source in (generation, config):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(sorted(set(ids)))
