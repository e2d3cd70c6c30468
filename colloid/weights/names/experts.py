"""Layers whose MLP is a mixture of experts, and the dense ones between them: what all such families share."""

from __future__ import annotations

from dataclasses import replace

from colloid.weights.names.llama import HF_LAYER, LAYER, MLP, MLP_NORM
from colloid.weights.names.table import GATE_UP, SAME, Entry, ModelShape, Shard

HF_EXPERT = HF_LAYER + "mlp.experts.{expert}."
HF_SHARED = HF_LAYER + "mlp.shared_experts."
LOCAL_EXPERT = LAYER + "mlp.experts.local_experts.{expert}."
GROUPED_EXPERT = LAYER + "mlp.experts."
SHARED = LAYER + "mlp.shared_experts."


def sparse(shape: ModelShape, layer: int) -> bool:
    """The layer has experts."""
    return shape.has_experts(layer)


def dense(shape: ModelShape, layer: int) -> bool:
    """The layer has an MLP."""
    return not shape.has_experts(layer)


DENSE_MLP = [replace(entry, present=dense) for entry in MLP]

ROUTER = Entry((HF_LAYER + "mlp.gate.weight",), (LAYER + "mlp.router.weight",), SAME, present=sparse)
EXPERT_BIAS = Entry(
    (HF_LAYER + "mlp.gate.e_score_correction_bias",), (LAYER + "mlp.router.expert_bias",), SAME, present=sparse
)
"""Chooses experts, and does not weight them. A buffer: nothing trains it."""

EXPERTS = [
    Entry(
        (HF_EXPERT + "gate_proj.weight", HF_EXPERT + "up_proj.weight"),
        (LOCAL_EXPERT + "linear_fc1.weight", GROUPED_EXPERT + "linear_fc1.weight{expert}"),
        GATE_UP,
        Shard.GATED_ROWS,
        present=sparse,
    ),
    Entry(
        (HF_EXPERT + "down_proj.weight",),
        (LOCAL_EXPERT + "linear_fc2.weight", GROUPED_EXPERT + "linear_fc2.weight{expert}"),
        SAME,
        Shard.COLUMNS,
        present=sparse,
    ),
]
SHARED_EXPERTS = [
    Entry(
        (HF_SHARED + "gate_proj.weight", HF_SHARED + "up_proj.weight"),
        (SHARED + "linear_fc1.weight",),
        GATE_UP,
        Shard.GATED_ROWS,
        present=sparse,
    ),
    Entry((HF_SHARED + "down_proj.weight",), (SHARED + "linear_fc2.weight",), SAME, Shard.COLUMNS, present=sparse),
]

SOFTMAX_MOE = [MLP_NORM, *DENSE_MLP, ROUTER, *EXPERTS]
SIGMOID_MOE = [MLP_NORM, *DENSE_MLP, ROUTER, EXPERT_BIAS, *EXPERTS, *SHARED_EXPERTS]
