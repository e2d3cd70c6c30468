"""The layer stack of Llama, Qwen2 and Qwen3: one forward pass over packed tokens. Knows nothing of requests.

Layout
* Linear weights are held packed by oneDNN (opaque; faster than `F.linear` at every batch size, and a row of the result
  does not depend on the number of rows, as long as there are at least `MIN_ROWS`). They are the only copy.
* q, k and v are one matrix, gate and up another. The rows of q and k are permuted when packed, so that the two
  dimensions that RoPE rotates together lie side by side: RoPE is one complex multiplication in place.

Shapes: `T` packed tokens, `H` hidden, `D` head_dim, `Q` query heads, `K` key-value heads, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from colloid.engines.embedded.model_config import ModelConfig

# Below this number of rows oneDNN and MKL take other kernels, whose sums are rounded differently (measured on
# AVX-512; `invariance.py` checks it for the machine at hand).
MIN_ROWS = 2

_linear_packed = torch.ops.mkldnn._linear_pointwise.default
_pack = torch.ops.mkldnn._reorder_linear_weight

# attend(layer, qkv [T, (Q + 2K) D]) stores k and v where it wants and returns the attention's output [T, Q D].
Attend = Callable[[int, torch.Tensor], torch.Tensor]


class PackedLinear:
    """A weight [out, in] and a bias [out] or None; `dense()` gives back exactly the weight that was packed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight = _pack(weight.contiguous(), None)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _linear_packed(x, self.weight, self.bias, "none", [], "")

    def dense(self) -> torch.Tensor:
        return self.weight.to_dense()


@dataclass
class Layer:
    """The weights of one layer; q and k rows (and their norms' weights) permuted for RoPE."""

    input_norm: torch.Tensor | None = None
    qkv: PackedLinear | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    output: PackedLinear | None = None
    post_attention_norm: torch.Tensor | None = None
    gate_up: PackedLinear | None = None
    down: PackedLinear | None = None


class Model:
    """The weights of a model in one dtype and the forward pass over them. `weights.py` fills the weights in."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, context_length: int, float32_head: bool = False):
        self.config = config
        self.dtype = dtype
        self.head_dtype = torch.float32 if float32_head else dtype
        self.embedding: torch.Tensor | None = None
        self.layers = [Layer() for _ in range(config.num_layers)]
        self.final_norm: torch.Tensor | None = None
        self.head: PackedLinear | None = None
        angles = torch.outer(torch.arange(context_length).float(), config.rope_frequencies)
        self._rotations = torch.polar(torch.ones_like(angles), angles)  # [context_length, D / 2] complex64

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """tokens, positions [T] int64 -> hidden states [T, H] before the final norm. T must be at least MIN_ROWS."""
        shape, epsilon, inner = (self.config.hidden_size,), self.config.norm_epsilon, self.config.intermediate_size
        x = F.embedding(tokens, self.embedding)
        rotations = self._rotations[positions][:, None]
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(F.rms_norm(x, shape, layer.input_norm, epsilon))
            self._rotate_(qkv, rotations, layer)
            x += layer.output(attend(i, qkv))
            gate_up = layer.gate_up(F.rms_norm(x, shape, layer.post_attention_norm, epsilon))
            x += layer.down(F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:]))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> logits [T, V] float32. T must be at least MIN_ROWS."""
        x = F.rms_norm(hidden, (self.config.hidden_size,), self.final_norm, self.config.norm_epsilon)
        return self.head(x.to(self.head_dtype)).float()

    def _rotate_(self, qkv: torch.Tensor, rotations: torch.Tensor, layer: Layer) -> None:
        """Norms (Qwen3) and rotates the q and k heads of qkv in place, in float32. rotations [T, 1, D / 2]."""
        c = self.config
        heads = c.num_heads + c.num_kv_heads
        qk = qkv[:, : heads * c.head_dim]
        if layer.q_norm is not None:
            q, k = qk.view(-1, heads, c.head_dim).split((c.num_heads, c.num_kv_heads), 1)
            q.copy_(F.rms_norm(q, (c.head_dim,), layer.q_norm, c.norm_epsilon))
            k.copy_(F.rms_norm(k, (c.head_dim,), layer.k_norm, c.norm_epsilon))
        if self.dtype is torch.float32:
            torch.view_as_complex(qk.view(-1, heads, c.head_dim // 2, 2)).mul_(rotations)
        else:
            wide = qk.float()
            torch.view_as_complex(wide.view(-1, heads, c.head_dim // 2, 2)).mul_(rotations)
            qk.copy_(wide)


def interleave_rotated_pairs(head_dim: int) -> torch.Tensor:
    """Order of a head's rows in which dimensions i and i + D/2, which RoPE rotates together, are neighbours."""
    half = torch.arange(head_dim // 2)
    return torch.stack((half, half + head_dim // 2), 1).flatten()
