"""From hidden states to the rotated queries, keys and values of grouped-query attention.

q, k and v are one matrix. MLA's counterpart is in mla.py: both give what `attention.py` takes, the heads of q, k and v
one after the other in each row.

Shapes: `T` packed tokens, `H` hidden, `D` head_dim, `Q` query heads, `K` key-value heads, `R` rotated dimensions.
"""

import torch
import torch.nn.functional as F

from colloid.engines.embedded.linear import PackedLinear
from colloid.engines.embedded.model_config import ModelConfig
from colloid.engines.embedded.rope import rotate_


class GroupedHeads:
    """The weights of one layer; q and k rows (and their norms' weights) permuted for RoPE."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.qkv: PackedLinear | None = None
        self.q_norm: torch.Tensor | None = None
        self.k_norm: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """x [T, H], rotations [T, 1, R / 2] -> [T, (Q + 2K) D]."""
        c = self.config
        dim, heads = c.key_dim, c.num_heads + c.num_kv_heads
        qkv = self.qkv(x)
        qk = qkv[:, : heads * dim].view(-1, heads, dim)
        if self.q_norm is not None:
            q, k = qk.split((c.num_heads, c.num_kv_heads), 1)
            q.copy_(F.rms_norm(q, (dim,), self.q_norm, c.norm_epsilon))
            k.copy_(F.rms_norm(k, (dim,), self.k_norm, c.norm_epsilon))
        rotate_(qk[..., : c.rope.width], rotations)
        return qkv

    def linears(self) -> list[PackedLinear]:
        return [self.qkv]
