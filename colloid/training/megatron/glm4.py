"""GLM-4 (`Glm4ForCausalLM`): norms also on what attention and MLP put out, before the residual is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


class PostNormLayer(TransformerLayer):
    """A layer with `post_self_attn_layernorm` and `post_mlp_layernorm`.

    Args:
        post_norm: builds a norm from (config, hidden_size, eps).
    """

    def __init__(
        self, config: TransformerConfig, submodules: Any, *args: Any, post_norm: Callable[..., Any], **kwargs: Any
    ):
        super().__init__(config, submodules, *args, **kwargs)
        self.post_self_attn_layernorm = post_norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = post_norm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = _normed(self.self_attn_bda, self.post_self_attn_layernorm)
        self.mlp_bda = _normed(self.mlp_bda, self.post_mlp_layernorm)


def _normed(add: Callable[..., Any], norm: torch.nn.Module) -> Callable[..., Any]:
    """`add(training, fused)` of Megatron, which adds bias and residual, with the norm before it."""

    def build(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add_residual = add(training, fused)

        def normed(
            output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            hidden, bias = output
            return add_residual((norm(hidden if bias is None else hidden + bias), None), residual, dropout)

        return normed

    return build
