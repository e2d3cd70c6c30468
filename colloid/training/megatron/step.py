"""Passes over micro-batches through Megatron's schedule: log-probs alone, or a step's forward, backward and update.

The one loss convention: a micro-batch's loss is its share of the step's loss, already divided by the denominators of
the whole global batch. Gradients are therefore sums: over micro-batches, and over data- and context-parallel ranks.
Megatron is kept from dividing again by `calculate_per_token_loss` together with a token count of 0.

Context-parallel ranks gather log-probs and entropies of all response tokens and compute the same loss: quantities of a
whole sample need no thought, metrics are already the same on them, and each backpropagates through its own tokens.

`R` response tokens of a micro-batch, `R'` of them predicted on this rank, `H` hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from colloid.errors import ColloidError
from colloid.training.logprob import token_log_probs
from colloid.training.megatron.logits_head import LogitsHead
from colloid.training.megatron.model import unwrap
from colloid.training.megatron.parallel import gather_objects, gather_responses, is_last_stage, tensor_parallel_group
from colloid.training.megatron.routing_replay import RoutedPass
from colloid.training.micro_batch import MicroBatch

Sums = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Metric -> (weighted sum, weight): what can be added up over micro-batches and ranks."""

MicroBatchLoss = Callable[[int, MicroBatch, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, Sums]]
"""(index of the micro-batch in the step, it, log-probs [R], entropies [R] or None) -> (its share of the loss, sums).
Of a critic values [R], of a `LogitsHead` logits [R, V] take the place of log-probs."""


class NonFiniteError(ColloidError, FloatingPointError):
    """A loss or a gradient norm is infinite or not a number. Names the rollout and the step."""


@dataclass(frozen=True)
class Head:
    """How hidden states become log-probs."""

    temperature: float
    chunk_tokens: int
    """Most tokens in a block of logits; -1 chooses."""

    def __call__(
        self, model: torch.nn.Module, micro_batch: MicroBatch, hidden: torch.Tensor, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [R', H] -> float32 log-probs [R] of the responses, and entropies [R] where asked for."""
        policy, tp_group = unwrap(model), tensor_parallel_group()
        log_probs, entropies = token_log_probs(
            hidden,
            policy.head_weight(),
            micro_batch.targets,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
            tp_group=tp_group if tp_group.size() > 1 else None,
            vocab_size=policy.true_vocab_size,
        )
        if micro_batch.response_rows is None:
            return log_probs, entropies
        parts = torch.stack([log_probs] if entropies is None else [log_probs, entropies])
        whole = gather_responses(parts, micro_batch.response_rows, len(micro_batch.loss_mask))
        return whole[0], None if entropies is None else whole[1]


@dataclass(frozen=True)
class ValueHead:
    """How hidden states become a critic's values; takes the place of `Head`."""

    def __call__(
        self, model: torch.nn.Module, micro_batch: MicroBatch, hidden: torch.Tensor, _with_entropy: bool
    ) -> tuple[torch.Tensor, None]:
        """Hidden states [R', H] -> float32 values [R] of the responses. No temperature enters."""
        values = hidden.float() @ unwrap(model).value_head.weight[0].float()
        if micro_batch.response_rows is None:
            return values, None
        return gather_responses(values[None], micro_batch.response_rows, len(micro_batch.loss_mask))[0], None


@torch.no_grad()
def compute_log_probs(
    chunks: list[DistributedDataParallel],
    micro_batches: Sequence[MicroBatch],
    head: Head | ValueHead,
    routed: RoutedPass | None = None,
) -> list[torch.Tensor]:
    """Log-probs [R] (of a `ValueHead`, values) of each micro-batch under the current weights; on the last pipeline
    stage (elsewhere empty). `routed`: where experts are noted or replayed.
    """

    def collect(model: torch.nn.Module, _index: int, micro_batch: MicroBatch, hidden: torch.Tensor, **_: Any) -> Any:
        return head(model, micro_batch, hidden, False)[0]

    return _run(chunks, micro_batches, collect, forward_only=True, routed=routed)


@torch.no_grad()
def compute_log_probs_and_entropies(
    chunks: list[DistributedDataParallel],
    micro_batches: Sequence[MicroBatch],
    head: Head,
    routed: RoutedPass | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """As `compute_log_probs`, with the entropies [R]."""

    def collect(model: torch.nn.Module, _index: int, micro_batch: MicroBatch, hidden: torch.Tensor, **_: Any) -> Any:
        return head(model, micro_batch, hidden, True)

    pairs = _run(chunks, micro_batches, collect, forward_only=True, routed=routed)
    return [log_probs for log_probs, _ in pairs], [entropies for _, entropies in pairs]


def forward_backward(
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    micro_batches: Sequence[MicroBatch],
    head: Head | ValueHead | LogitsHead,
    loss: MicroBatchLoss,
    *,
    with_entropy: bool,
    recompute_loss: bool = False,
    routed: RoutedPass | None = None,
) -> Sums:
    """Leaves the step's gradient, summed over all ranks, in the main gradients.

    Without micro-batches (on all ranks, then) the gradient is zero, and nothing is communicated.

    Args:
        recompute_loss: keep nothing between hidden states and loss; the backward computes it again.
        routed: where experts are noted or replayed.

    Returns:
        Metrics summed over this rank's micro-batches; empty where this is not the last pipeline stage.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    # After a step `grad` is `main_grad`; left in place, the gradient would be added to itself.
    optimizer.zero_grad()
    if not micro_batches:
        return {}

    def computed(model: torch.nn.Module, index: int, micro_batch: MicroBatch, hidden: torch.Tensor) -> Any:
        return loss(index, micro_batch, *head(model, micro_batch, hidden, with_entropy))

    def share(*given: Any) -> Any:
        # To its end: stopping early is an exception thrown through a user's function, or past another rank's gather.
        with set_checkpoint_early_stop(False):
            value, sums = checkpoint(computed, *given, use_reentrant=False) if recompute_loss else computed(*given)
        return value, torch.zeros((), dtype=torch.int, device=value.device), sums

    total: Sums = {}
    for sums in _run(chunks, micro_batches, share, forward_only=False, routed=routed):
        for name, (value, weight) in sums.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + value.detach(), before[1] + weight)
    return total


def optimizer_step(optimizer: MegatronOptimizer, chunks: list[DistributedDataParallel]) -> float:
    """Clips, updates the weights and returns the norm of the gradient before clipping."""
    if optimizer.config.clip_grad > 0:
        norm = optimizer.step()[1]
    else:
        optimizer.prepare_grads()
        norm = optimizer.get_grad_norm()
        optimizer.step()
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            # The head's weight is used outside of the module whose hook would wait for it.
            chunk.start_param_sync(force_sync=True)
    return float(norm)


def reduce_sums(sums: Sums, device: str) -> dict[str, tuple[float, float]]:
    """Adds (sum, weight) pairs over the data-parallel ranks. Collective; the same on all ranks."""
    totals: list[dict[str, tuple[float, float]]] = [{}]
    if is_last_stage():
        group = parallel_state.get_data_parallel_group()
        # A rank may lack a metric: its samples have no log-probs of the engine, or a user's function left it out.
        everywhere = gather_objects(set(sums), group) if group.size() > 1 else [set(sums)]
        names = sorted(set().union(*everywhere))
        flat = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
        for row, name in enumerate(names):
            if name in sums:
                flat[row, 0], flat[row, 1] = sums[name]
        if names and group.size() > 1:
            dist.all_reduce(flat, group=group)
        totals = [{name: (value, weight) for name, (value, weight) in zip(names, flat.tolist(), strict=True)}]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast_object_list(totals, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return totals[0]


def check_finite(what: str, value: float, rollout_id: int, step: int) -> None:
    """
    Raises:
        NonFiniteError: the value is infinite or not a number.
    """
    if not math.isfinite(value):
        raise NonFiniteError(
            f"the {what} is {value} in optimizer step {step} of rollout {rollout_id}: the weights are lost. "
            "Continue from the last checkpoint with a lower --lr or --clip-grad, or look at that "
            "rollout's rewards and log-probs"
        )


def _run(
    chunks: list[DistributedDataParallel],
    micro_batches: Sequence[MicroBatch],
    finish: Callable[..., Any],
    *,
    forward_only: bool,
    routed: RoutedPass | None = None,
) -> list[Any]:
    """Megatron's schedule. `finish(model, index, micro_batch, hidden)` runs on the last stage; returns its results."""

    def step(iterator: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        index, micro_batch = next(iterator)
        precision = {"fp32_output": False} if unwrap(model).config.bf16 else {}
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=micro_batch.cu_seqlens,
            cu_seqlens_kv=micro_batch.cu_seqlens,
            max_seqlen_q=micro_batch.max_length,
            max_seqlen_kv=micro_batch.max_length,
        )
        with routed.forward_of(micro_batch) if routed else nullcontext():
            hidden = model(micro_batch.tokens, micro_batch.position_ids, packed, micro_batch.positions, **precision)
        return hidden, lambda output, **flags: finish(model, index, micro_batch, output, **flags)

    iterators = [iter(list(enumerate(micro_batches))) for _ in chunks]
    with routed or nullcontext():
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=max(micro_batch.tokens.shape[1] for micro_batch in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
