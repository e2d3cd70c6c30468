"""From hidden states to queries, keys and values of multi-head latent attention (MLA).

Families: DeepSeek V3, Kimi K2, Moonlight, GLM-4.7-Flash.

Keys and values come from one narrow latent vector a token; a head's key is its own part, which is not rotated, and a
rotated part that all heads have in common. What goes into the cache is what attention reads, every head's whole key
and value: attention is then that of any model (one key-value head a query head), computed in the order in which the
trainer and Hugging Face do it. A cache of latents would be several times smaller, but multiplies out the
up-projections in another order at every step; on a CPU, with the models that fit there, memory is not what is short.

Shapes: `T` packed tokens, `H` hidden, `N` heads, `D` key_dim = P + R (own, rotated), `E` value_dim.
"""

import torch
import torch.nn.functional as F

from colloid.engines.embedded.linear import PackedLinear
from colloid.engines.embedded.model_config import ModelConfig
from colloid.engines.embedded.rope import rotate_

# Hugging Face's classes give the latents' norms this epsilon, whatever rms_norm_eps says.
LATENT_NORM_EPSILON = 1e-6


class LatentHeads:
    """The weights of one layer; rotated rows permuted for RoPE. Without a q_lora_rank, `q_up` takes x itself."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.q_down: PackedLinear | None = None
        self.q_norm: torch.Tensor | None = None
        self.q_up: PackedLinear | None = None
        self.kv_down: PackedLinear | None = None
        self.kv_norm: torch.Tensor | None = None
        self.kv_up: PackedLinear | None = None

    def __call__(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """x [T, H], rotations [T, 1, R / 2] -> [T, N (2 D + E)]: queries, keys, values."""
        c = self.config
        heads, dim, own = c.num_heads, c.key_dim, c.key_dim - c.rope.width
        rank = c.latent.kv_rank
        keys_values = self.kv_down(x)
        latent = F.rms_norm(keys_values[:, :rank], (rank,), self.kv_norm, LATENT_NORM_EPSILON)
        expanded = self.kv_up(latent.contiguous()).view(-1, heads, own + c.value_dim)
        qkv = x.new_empty(len(x), c.qkv_width)
        qk = qkv[:, : 2 * heads * dim].view(-1, 2, heads, dim)
        qk[:, 0] = self._queries(x).view(-1, heads, dim)
        qk[:, 1, :, :own] = expanded[..., :own]
        qk[:, 1, :, own:] = keys_values[:, None, rank:]
        qkv[:, 2 * heads * dim :].view(-1, heads, c.value_dim).copy_(expanded[..., own:])
        rotate_(qk.view(-1, 2 * heads, dim)[..., own:], rotations)
        return qkv

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        rank = self.config.latent.q_rank
        if rank is None:
            return self.q_up(x)
        return self.q_up(F.rms_norm(self.q_down(x), (rank,), self.q_norm, LATENT_NORM_EPSILON))

    def linears(self) -> list[PackedLinear]:
        return [linear for linear in (self.q_down, self.q_up, self.kv_down, self.kv_up) if linear is not None]
