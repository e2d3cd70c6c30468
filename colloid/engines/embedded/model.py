"""The layer stack: one forward pass over packed tokens. Knows nothing of requests.

What differs between families is in the parts that a layer is made of: how queries, keys and values come about
(heads.py, mla.py), and whether the MLP is dense (linear.py) or a layer of experts (moe.py).

Shapes: `T` packed tokens, `H` hidden, `R` rotated dimensions of a head, `V` vocabulary; `W` the width of q, k and v of
all heads, `O` that of attention's output.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from colloid.engines.embedded.heads import GroupedHeads
from colloid.engines.embedded.linear import MIN_ROWS, GatedMlp, PackedLinear
from colloid.engines.embedded.mla import LatentHeads
from colloid.engines.embedded.model_config import ModelConfig
from colloid.engines.embedded.moe import ExpertMlp

# attend(layer, qkv [T, W]) stores k and v where it wants and returns the attention's output [T, O].
Attend = Callable[[int, torch.Tensor], torch.Tensor]


class Layer:
    """The weights of one layer. `attention_norm`, `mlp_norm`: of the outputs, where the family has such (GLM-4)."""

    def __init__(self, config: ModelConfig, has_experts: bool):
        self.input_norm: torch.Tensor | None = None
        self.heads = LatentHeads(config) if config.latent else GroupedHeads(config)
        self.output: PackedLinear | None = None
        self.attention_norm: torch.Tensor | None = None
        self.post_attention_norm: torch.Tensor | None = None
        self.mlp = ExpertMlp(config.experts) if has_experts else GatedMlp(config.intermediate_size)
        self.mlp_norm: torch.Tensor | None = None

    def linears(self) -> list[PackedLinear]:
        """One linear of each shape that this layer has."""
        return [*self.heads.linears(), self.output, *self.mlp.linears()]


class Model:
    """The weights of a model in one dtype and the forward pass over them. `weights.py` fills the weights in."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, context_length: int, float32_head: bool = False):
        self.config = config
        self.dtype = dtype
        self.head_dtype = torch.float32 if float32_head else dtype
        self.embedding: torch.Tensor | None = None
        self.layers = [Layer(config, has_experts) for has_experts in config.has_experts]
        self.final_norm: torch.Tensor | None = None
        self.head: PackedLinear | None = None
        self._rotations = config.rope.rotations(context_length)

    def require_rows(self, min_rows: int) -> None:
        """From now on an expert computes at least this many rows, however few tokens choose it."""
        for layer in self.layers:
            if isinstance(layer.mlp, ExpertMlp):
                layer.mlp.min_rows = max(min_rows, MIN_ROWS)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """tokens, positions [T] int64 -> hidden states [T, H] before the final norm. T must be at least MIN_ROWS.

        chosen: [T, layers, experts a token]: where the numbers of the chosen experts are written, of layers with any.
        """
        x = F.embedding(tokens, self.embedding)
        rotations = self._rotations[positions][:, None]
        for i, layer in enumerate(self.layers):
            qkv = layer.heads(self._norm(x, layer.input_norm), rotations)
            attended = layer.output(attend(i, qkv))
            x += attended if layer.attention_norm is None else self._norm(attended, layer.attention_norm)
            mlp_input = self._norm(x, layer.post_attention_norm)
            records = chosen is not None and self.config.has_experts[i]
            out = layer.mlp(mlp_input, chosen[:, i]) if records else layer.mlp(mlp_input)
            x += out if layer.mlp_norm is None else self._norm(out, layer.mlp_norm)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> logits [T, V] float32. T must be at least MIN_ROWS."""
        return self.head(self._norm(hidden, self.final_norm).to(self.head_dtype)).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.norm_epsilon)
