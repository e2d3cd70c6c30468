"""Logits of the response positions, for losses that ask for them. Log-probs alone never need them all at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)

from colloid.training.megatron.model import unwrap
from colloid.training.megatron.parallel import gather_responses, tensor_parallel_group
from colloid.training.micro_batch import MicroBatch


@dataclass(frozen=True)
class LogitsHead:
    """How hidden states become logits; takes the place of `Head`."""

    def __call__(
        self, model: torch.nn.Module, micro_batch: MicroBatch, hidden: torch.Tensor, _with_entropy: bool
    ) -> tuple[torch.Tensor, None]:
        """Hidden states [R', H] -> float32 logits [R, V] of the responses over the whole vocabulary without padding, on
        every rank that shares the model or the sequences. No temperature enters.
        """
        policy, shared = unwrap(model), tensor_parallel_group().size() > 1
        hidden = hidden.float()
        if shared:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        logits = torch.nn.functional.linear(hidden, policy.head_weight().float())
        if shared:
            logits = gather_from_tensor_model_parallel_region(logits)
        logits = logits[:, : policy.true_vocab_size]
        if micro_batch.response_rows is None:
            return logits, None
        return gather_responses(logits.t(), micro_batch.response_rows, len(micro_batch.loss_mask)).t(), None
