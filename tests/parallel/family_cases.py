"""What the ranks of `test_families.py` do: forward, gradient and export of each family's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from colloid.data.batch import RolloutBatch
from colloid.data.columns import to_columns
from colloid.data.sample import Sample
from tests.parallel.cases import Ranks
from tests.parallel.family_models import VOCAB
from tests.parallel.rollouts import TEMPERATURE, split

LENGTHS = (12, 20, 17, 9)


def make_batch() -> RolloutBatch:
    """Sequences whose tokens are all predicted, but for the first; their weights in the loss differ."""
    random = np.random.default_rng(3)
    samples = []
    for index, length in enumerate(LENGTHS):
        tokens = random.integers(0, VOCAB, length).tolist()
        sample = Sample(index=index, group_index=0, tokens=tokens[:1], status=Sample.Status.PENDING)
        sample.append_response_tokens(tokens[1:], log_probs=[-1.0] * (length - 1))
        sample.status = Sample.Status.COMPLETED
        samples.append(sample)
    rewards = np.array([1.0, -0.5, 0.7, -1.2])
    return to_columns(samples, raw_rewards=rewards, rewards=rewards)


def hf_outputs(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [R, V] at all positions that predict, and gradients by name of the sum of reward x mean log-prob."""
    batch = make_batch()
    logits, loss = [], torch.zeros(())
    for row, (begin, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
        tokens = torch.from_numpy(batch.tokens[begin:end].astype(np.int64))
        logits.append(model(input_ids=tokens[None], use_cache=False).logits[0, :-1])
        log_probs = (logits[-1] / TEMPERATURE).log_softmax(-1).gather(-1, tokens[1:, None])
        loss = loss + float(batch.rewards[row]) * log_probs.mean()
    loss.backward()
    return torch.cat(logits).detach(), {name: p.grad for name, p in model.named_parameters()}


def outputs(rank: int, world_size: int, init_method: str, runs: dict[str, dict[str, Any]]) -> dict[str, dict]:
    """Of each run, {model, options}: logits (on the last pipeline stage), gradients and exported weights (rank 0)."""
    ranks = Ranks(rank, world_size, init_method)
    results = {}
    for name, run in runs.items():
        try:
            results[name] = _outputs(ranks, rank, run["model"], run.get("options", {}))
        except Exception as error:
            error.add_note(f"in the run {name!r}")
            raise
    return results


def _outputs(ranks: Ranks, rank: int, model: Path, options: dict[str, Any]) -> dict[str, Any]:
    from colloid.training.megatron import parallel, step
    from colloid.training.megatron.model import unwrap

    actor = ranks.actor(model, clip_grad=0.0, **options)
    batch, parts = make_batch(), parallel.data_parallel_size()
    # The whole batch on each rank for the logits; its parts for the gradient, which is summed.
    whole = split(batch, 1, len(LENGTHS))[0]
    (micro_batches,) = actor._micro_batches(whole, whole.micro_batches)

    def project(module: torch.nn.Module, _index: int, micro_batch: Any, hidden: torch.Tensor, **_: Any) -> Any:
        policy, group = unwrap(module), parallel.tensor_parallel_group()
        shard = hidden @ policy.head_weight().T
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        torch.distributed.all_gather(shards, shard.contiguous(), group=group)
        # Under context parallelism each rank has some of the rows.
        rows, count = micro_batch.response_rows, len(micro_batch.response_index)
        logits = hidden.new_zeros(count, shard.shape[1] * group.size())
        logits[micro_batch.response_index[slice(None) if rows is None else rows]] = torch.cat(shards, -1)
        torch.distributed.all_reduce(logits, group=parallel.parallel_state.get_context_parallel_group())
        return logits[:, : policy.true_vocab_size]

    with torch.no_grad():
        logits = step._run(actor._chunks, micro_batches, project, forward_only=True)
    part = split(batch, parts, 1)[rank % parts if parts > 1 else 0]
    (micro_batches,) = actor._micro_batches(part, part.micro_batches)

    def loss(_index: int, micro_batch: Any, log_probs: torch.Tensor, _entropy: Any) -> tuple[torch.Tensor, dict]:
        lengths = torch.bincount(micro_batch.sample_index)
        weights = (micro_batch.rewards / lengths)[micro_batch.sample_index]
        return (log_probs * weights).sum().float(), {}

    step.forward_backward(actor._chunks, actor._optimizer, micro_batches, actor._head, loss, with_entropy=False)
    exported = _by_name(actor)
    weights = {}
    for name, parameter in actor._parameters:
        if hasattr(parameter, "main_grad"):
            weights[name] = parameter.data
            parameter.data = parameter.main_grad
    gradients = _by_name(actor)
    for name, parameter in actor._parameters:
        if name in weights:
            parameter.data = weights[name]
    actor.close()
    return {"logits": logits[0] if logits else None, "gradients": gradients, "weights": exported}


def _by_name(actor: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in actor._export()}


def hf_gradient(gradients: dict[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """That of a tensor as checkpoints name it; transformers stacks experts in memory. None for a buffer."""
    if ".mlp.experts." not in name:
        return gradients.get(name)
    prefix, expert, projection, _ = name.rsplit(".", 3)
    if projection == "down_proj":
        return gradients[f"{prefix}.down_proj"][int(expert)]
    gate, up = gradients[f"{prefix}.gate_up_proj"][int(expert)].chunk(2)
    return gate if projection == "gate_proj" else up
