"""Which Hugging Face tensors a model has, and which attribute of the model each of them fills.

Tensors that are computed with as one matrix (q, k and v; gate and up) fill one slot, stacked along the rows. Names are
those that transformers writes to disk: experts one by one.
"""

from dataclasses import dataclass, field

import torch

from colloid.engines.embedded.heads import GroupedHeads
from colloid.engines.embedded.linear import GatedMlp
from colloid.engines.embedded.mla import LatentHeads
from colloid.engines.embedded.model import Layer, Model
from colloid.engines.embedded.model_config import ModelConfig
from colloid.engines.embedded.moe import ExpertMlp

LAYERS = "model.layers."
HEAD = "lm_head.weight"


@dataclass
class Part:
    """One HF tensor. `row_order`: order in which the rows of each head are packed, None: as they are."""

    name: str
    shape: tuple[int, ...]
    row_order: torch.Tensor | None = None

    @property
    def original_order(self) -> torch.Tensor | None:
        return None if self.row_order is None else torch.argsort(self.row_order)


@dataclass
class Slot:
    """One attribute of the model and the HF tensors that it is made of: weights first, then biases.

    dtype: that in which tensors are taken and given back; compute_dtype: that of the packed matrix of a linear, to
    which dtype converts without loss.
    """

    owner: object
    attribute: str
    weights: list[Part]
    dtype: torch.dtype
    is_linear: bool = False
    compute_dtype: torch.dtype | None = None
    biases: list[Part] = field(default_factory=list)
    staged: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def parts(self) -> list[Part]:
        return self.weights + self.biases


@dataclass(frozen=True)
class _Rows:
    """A linear's HF module and number of rows, with their order (see Part)."""

    module: str
    count: int
    order: torch.Tensor | None = None


def make_slots(model: Model) -> list[Slot]:
    """All slots of a model, in the order of the forward pass."""
    c, make = model.config, _SlotMaker(model.dtype)
    slots = [Slot(model, "embedding", [Part("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))], model.dtype)]
    for i, layer in enumerate(model.layers):
        slots += _layer_slots(make, layer, c, f"{LAYERS}{i}.")
    slots.append(make.vector(model, "final_norm", "model.norm.weight", c.hidden_size))
    if not c.tied_embeddings:
        head = make.linear(model, "head", "", [_Rows(HEAD.removesuffix(".weight"), c.vocab_size)], c.hidden_size)
        head.compute_dtype = model.head_dtype
        slots.append(head)
    return slots


class _SlotMaker:
    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def vector(self, owner: object, attribute: str, name: str, size: int, order: torch.Tensor | None = None) -> Slot:
        return Slot(owner, attribute, [Part(name, (size,), order)], self.dtype)

    def linear(
        self, owner: object, attribute: str, base: str, rows: list[_Rows], width: int, bias: bool = False
    ) -> Slot:
        weights = [Part(f"{base}{r.module}.weight", (r.count, width), r.order) for r in rows]
        biases = [Part(f"{base}{r.module}.bias", (r.count,), r.order) for r in rows if bias]
        return Slot(owner, attribute, weights, self.dtype, True, self.dtype, biases)


def _layer_slots(make: _SlotMaker, layer: Layer, c: ModelConfig, base: str) -> list[Slot]:
    hidden = c.hidden_size
    norms = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    if c.post_norms:
        norms |= {"attention_norm": "post_self_attn_layernorm", "mlp_norm": "post_mlp_layernorm"}
    slots = [make.vector(layer, attribute, f"{base}{name}.weight", hidden) for attribute, name in norms.items()]
    heads = _latent_slots if c.latent else _grouped_slots
    slots += heads(make, layer.heads, c, f"{base}self_attn.")
    output = [_Rows("self_attn.o_proj", hidden)]
    slots.append(make.linear(layer, "output", base, output, c.num_heads * c.value_dim, c.output_bias))
    if isinstance(layer.mlp, ExpertMlp):
        return slots + _expert_slots(make, layer.mlp, c, f"{base}mlp.")
    return slots + _mlp_slots(make, layer.mlp, c, f"{base}mlp.", c.mlp_bias, c.fused_gate_up)


def _grouped_slots(make: _SlotMaker, heads: GroupedHeads, c: ModelConfig, base: str) -> list[Slot]:
    order = c.rope.row_order(before=0, after=c.key_dim - c.rope.width)
    orders = (order, order, None)
    rows = [_Rows(f"{x}_proj", count, order) for x, count, order in zip("qkv", c.qkv_widths, orders, strict=True)]
    slots = [make.linear(heads, "qkv", base, rows, c.hidden_size, c.qkv_bias)]
    if c.qk_norm:
        for name in ("q_norm", "k_norm"):
            slots.append(make.vector(heads, name, f"{base}{name}.weight", c.key_dim, order))
    return slots


def _latent_slots(make: _SlotMaker, heads: LatentHeads, c: ModelConfig, base: str) -> list[Slot]:
    own, latent, hidden, queries = c.key_dim - c.rope.width, c.latent, c.hidden_size, c.num_heads * c.key_dim
    q_order, kv_order = (c.rope.row_order(before, after=0) for before in (own, latent.kv_rank))
    kv_down = [_Rows("kv_a_proj_with_mqa", latent.kv_rank + c.rope.width, kv_order)]
    kv_up = [_Rows("kv_b_proj", c.num_heads * (own + c.value_dim))]
    slots = [
        make.linear(heads, "kv_down", base, kv_down, hidden, c.qkv_bias),
        make.vector(heads, "kv_norm", f"{base}kv_a_layernorm.weight", latent.kv_rank),
        make.linear(heads, "kv_up", base, kv_up, latent.kv_rank),
    ]
    if latent.q_rank is None:
        return [make.linear(heads, "q_up", base, [_Rows("q_proj", queries, q_order)], hidden), *slots]
    return [
        make.linear(heads, "q_down", base, [_Rows("q_a_proj", latent.q_rank)], hidden, c.qkv_bias),
        make.vector(heads, "q_norm", f"{base}q_a_layernorm.weight", latent.q_rank),
        make.linear(heads, "q_up", base, [_Rows("q_b_proj", queries, q_order)], latent.q_rank),
        *slots,
    ]


def _mlp_slots(
    make: _SlotMaker, mlp: GatedMlp, c: ModelConfig, base: str, bias: bool = False, fused: bool = False
) -> list[Slot]:
    gate_up = [_Rows("gate_proj", mlp.inner), _Rows("up_proj", mlp.inner)]
    if fused:
        gate_up = [_Rows("gate_up_proj", 2 * mlp.inner)]
    return [
        make.linear(mlp, "gate_up", base, gate_up, c.hidden_size, bias),
        make.linear(mlp, "down", base, [_Rows("down_proj", c.hidden_size)], mlp.inner, bias),
    ]


def _expert_slots(make: _SlotMaker, mlp: ExpertMlp, c: ModelConfig, base: str) -> list[Slot]:
    """The router computes in float32; its bias for the choice is float32 also where it is stored."""
    num_experts = mlp.config.num_experts
    router = make.linear(mlp, "router", base, [_Rows("gate", num_experts)], c.hidden_size)
    router.compute_dtype = torch.float32
    slots = [router]
    if mlp.config.scores == "sigmoid":
        bias = make.vector(mlp, "choice_bias", f"{base}gate.e_score_correction_bias", num_experts)
        bias.dtype = torch.float32
        slots.append(bias)
    for i, expert in enumerate(mlp.experts):
        slots += _mlp_slots(make, expert, c, f"{base}experts.{i}.")
    if mlp.shared is not None:
        slots += _mlp_slots(make, mlp.shared, c, f"{base}shared_experts.")
    return slots
