"""Megatron's options, by Megatron-LM's names.

Three kinds: those that colloid reads itself (`USED`), those that name a field of one of Megatron-Core's config classes
and pass through to it, and those that do not work here yet. The last parse, so that the arguments of every model can
be planned with `--dry-run`, and are refused when a run starts.
"""

from __future__ import annotations

import json
import re
from typing import Any

from colloid.config import megatron_refused, moe_mla, tsv
from colloid.config.option import FLAG, OFF, SWITCH, Option

DEFAULTS = {
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "lr_decay_style": "constant",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_base": None,
    "num_query_groups": None,
    "norm_epsilon": None,
    "transformer_impl": None,
    "make_vocab_size_divisible_by": None,
    "rope_scaling_factor": None,
    "rotary_scaling_factor": None,
    "rotary_percent": None,
    **moe_mla.DEFAULTS,
}
"""Where colloid's default is not Megatron's: RL needs no dropout (it would change the ratio) and a constant rate."""

USED: dict[str, tuple | None] = {
    "num_layers": None,
    "hidden_size": None,
    "ffn_hidden_size": None,
    "num_attention_heads": None,
    "kv_channels": None,
    "group_query_attention": None,
    "num_query_groups": None,
    "max_position_embeddings": None,
    "position_embedding_type": ("rope",),
    "use_rotary_position_embeddings": None,
    "add_position_embedding": None,
    "rotary_base": None,
    "rotary_percent": None,
    "use_rope_scaling": None,
    "rope_scaling_factor": None,
    "rotary_scaling_factor": None,
    "normalization": ("RMSNorm",),
    "norm_epsilon": None,
    "swiglu": None,
    "untie_embeddings_and_output_weights": None,
    "vocab_size": None,
    "make_vocab_size_divisible_by": None,
    "attention_dropout": (0.0,),
    "hidden_dropout": (0.0,),
    "bf16": None,
    "start_weight_decay": None,
    "end_weight_decay": None,
    "weight_decay_incr_style": None,
    "lr_decay_style": None,
    "lr_decay_iters": None,
    "lr_warmup_iters": None,
    "lr_warmup_fraction": None,
    "lr_warmup_init": None,
    "lr_wsd_decay_style": None,
    "lr_wsd_decay_iters": None,
    "accumulate_allreduce_grads_in_fp32": None,
    "check_for_nan_in_loss_and_grad": None,
    "ddp_bucket_size": None,
    "recompute_activations": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "deterministic_mode": None,
    "use_mcore_models": None,
    "use_dist_ckpt": None,
    "ckpt_format": ("torch_dist",),
    "ckpt_step": None,
    "finetune": None,
    "no_load_optim": None,
    "no_load_rng": None,
    "no_save_rng": None,
    **moe_mla.USED,
}
"""Options that colloid reads, with the values that work (None: all). Some name what is done anyway."""

PASSED_ON = moe_mla.PASSED_ON | frozenset(
    [
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "add_bias_linear",
        "add_qkv_bias",
        "align_param_gather",
        "apply_query_key_layer_scaling",
        "apply_rope_fusion",
        "apply_wd_to_qk_layernorm",
        "attention_backend",
        "attention_softmax_in_fp32",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "bucket_size",
        "check_for_large_grads",
        "check_for_nan_in_grad",
        "clone_scatter_output_in_embedding",
        "context_parallel_size",
        "disable_bf16_reduced_precision_matmul",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "fp32_residual_connection",
        "grad_reduce_in_fp32",
        "gradient_accumulation_fusion",
        "gradient_reduce_div_fusion",
        "masked_softmax_fusion",
        "microbatch_group_size_per_virtual_pipeline_stage",
        "min_lr",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "optimizer",
        "overlap_grad_reduce",
        "overlap_p2p_comm",
        "overlap_param_gather",
        "pad_buckets_for_high_nccl_busbw",
        "persist_layer_norm",
        "pipeline_model_parallel_size",
        "qk_layernorm",
        "recompute_granularity",
        "recompute_method",
        "recompute_modules",
        "recompute_num_layers",
        "sequence_parallel",
        "sgd_momentum",
        "store_param_remainders",
        "tensor_model_parallel_size",
        "transformer_impl",
        "use_te_activation_func",
        "use_distributed_optimizer",
        "virtual_pipeline_model_parallel_size",
        "weight_decay",
    ]
)
"""Options whose value is passed on to the field that they name, and that is all it takes."""

PASSED_ON_WITH_CUDA = frozenset(
    [
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "main_grads_dtype",
        "main_params_dtype",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads",
        "pin_cpu_params",
        "use_precision_aware_optimizer",
        "use_torch_optimizer_for_cpu_offload",
    ]
)
"""The same, of the parts of Megatron's optimizer that exist for GPUs alone. (None of them has been run yet.)"""

_NOT_A_FIELD_OF_OURS = ("Callable", "ContextManager", "RecipeConfig")
"""Types of fields that colloid fills itself: they cannot be written on a command line."""

_DTYPES = ("float32", "bfloat16", "float16")

_EXTRA = (
    Option("--post-self-attn-layernorm", FLAG, False, group="network_size", category="megatron"),
    Option("--post-mlp-layernorm", FLAG, False, group="network_size", category="megatron"),
    *(
        Option(
            flag, FLAG, False, group, category="megatron", built=(), at_run=True, refused=megatron_refused.reason(name)
        )
        for flag, group, name in (
            ("--use-gated-attention", "network_size", "use_gated_attention"),
            ("--enable-experimental", "experimental", "enable_experimental"),
        )
    ),
)
"""Names that model scripts of this field use besides."""

_COUNTS = re.compile(r"_parallel_size$|^num_(layers|attention_heads|query_groups)$|^(hidden|ffn_hidden|vocab)_size$")
"""Attributes that must be at least 1."""

_CHOICES = {"--attention-backend": ("flash", "fused", "unfused", "local", "auto")}


def options() -> list[Option]:
    """Megatron's options as rows.

    A flag that only switches off what another row switches (`--no-persist-layer-norm`) is that row's other spelling.
    """
    rows = [option for row in tsv.read("megatron") if (option := _option(row)) is not None]
    switches = {f"--no-{option.flag[2:]}" for option in rows if option.kind == SWITCH}
    return [*(option for option in rows if option.flag not in switches), *_EXTRA]


def _option(row: dict[str, str]) -> Option | None:
    kind_text, field = row["action_or_type"], row["megatron-core 0.16.1 field"]
    if any(word in kind_text for word in _NOT_A_FIELD_OF_OURS) or row["flag"].startswith("---"):
        return None
    flag, *aliases = row["flag"].split("|")
    dtype = "torch.dtype" in kind_text
    kind = "str" if dtype else _kind(kind_text)
    dest = _dest(flag, kind, field)
    default = DEFAULTS.get(dest, True if kind == OFF else _default(row["default"], kind))
    choices = _DTYPES if dtype else _choices(flag, row["choices"], kind_text)
    built, at_run = None, False
    if dest in USED:
        built, at_run = USED[dest], True
    elif dest not in PASSED_ON | PASSED_ON_WITH_CUDA:
        built, at_run = (), True
    listed = "list[" in kind_text.lower() and row["group"] == "field"
    return Option(
        flag,
        kind,
        default,
        group=row["group"],
        category="megatron",
        choices=choices,
        low=1 if _COUNTS.search(dest) else None,
        nargs="+" if listed else "" if dest in moe_mla.SINGLE else row["nargs"],
        dest=dest,
        aliases=tuple(aliases),
        built=built,
        refused="" if built is None else megatron_refused.reason(dest),
        at_run=at_run,
        field=field,
    )


def _kind(text: str) -> str:
    if text in ("store_true", "store_false"):
        return FLAG if text == "store_true" else OFF
    if "bool" in text:
        return "bool" if text == "bool" else SWITCH
    if text.endswith("freq_type"):
        return "pattern"
    for kind in ("int", "float"):
        if re.search(rf"\b{kind}\b", text):
            return kind
    return "pattern" if text == "tuple_type" else "str"


def _dest(flag: str, kind: str, field: str) -> str:
    """Megatron-LM's attribute: what unsets something has the name of what it unsets."""
    name = flag.lstrip("-").replace("-", "_")
    if kind != OFF:
        return name
    return field.partition(".")[2] or re.sub(r"^(no|disable)_", "", name).replace(
        "position_embedding", "add_position_embedding"
    )


def _default(text: str, kind: str) -> Any:
    if kind in (FLAG, SWITCH, "bool"):
        return text in ("True", "true")
    if text in ("", "null", "None", "torch.float32", "<class 'torch.dtype'>") or text.startswith(
        ("int(", "AttnBackend")
    ):
        return None
    if text.startswith("["):
        return json.loads(text)
    if text == "2 ** 32":
        return float(2**32)
    return int(text) if kind in ("int", "pattern") else float(text) if kind == "float" else text


def _choices(flag: str, text: str, kind_text: str) -> tuple:
    if flag in _CHOICES:
        return _CHOICES[flag]
    if "Literal[" in kind_text:
        return tuple(re.findall(r"'([^']+)'", kind_text))
    return (
        tuple(choice for choice in json.loads(text) if choice is not None)
        if text.startswith('["') or text.startswith("[0")
        else ()
    )
