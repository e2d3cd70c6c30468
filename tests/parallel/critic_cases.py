"""What the ranks of `test_critic.py` do, and the same on a plain Hugging Face model with a linear head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from colloid.data.batch import RolloutBatch
from tests.parallel.cases import Ranks
from tests.parallel.rollouts import hf_model, make_rollout, split

CLIP = 0.1


def critic_of(ranks: Ranks, model: Path, *, head: bool = True, **options: Any) -> Any:
    """A critic; with `head` its value head is not zero."""
    from colloid.training.critic import Critic

    critic = ranks.actor(model, kind=Critic, advantage_estimator="ppo", value_clip=CLIP, **options)
    if head:
        set_head(critic)
    return critic


def set_head(critic: Any) -> None:
    from colloid.training.megatron.model import unwrap

    with torch.no_grad():
        last = unwrap(critic._chunks[-1])
        if last.post_process:
            last.value_head.weight.copy_(head_weight(last.config.hidden_size))
        critic._optimizer.reload_model_params()


def head_weight(hidden: int) -> torch.Tensor:
    """[1, hidden]."""
    return torch.linspace(-1, 1, hidden)[None] * 0.3


def made_up(batch: RolloutBatch, seed: int) -> np.ndarray:
    """float32 [R], of each token by its place in its sample: the same whatever rank has the sample."""
    index = np.repeat(batch.sample_ids, batch.response_lengths)
    place = np.arange(len(index)) - np.repeat(batch.response_offsets[:-1], batch.response_lengths)
    return np.sin(seed + 3.0 * index + 0.7 * place).astype(np.float32)


def one_step(rank: int, world_size: int, init_method: str, model: Path, micro_batches: list[int]) -> dict[int, Any]:
    """By size of micro-batches: values by sample, metrics, gradients by the trainer's names."""
    ranks = Ranks(rank, world_size, init_method)
    results = {}
    for size in micro_batches:
        critic = critic_of(ranks, model, lr=0.0, clip_grad=0.0)
        part = split(make_rollout(), world_size, size)[rank]
        values = critic.values(part)
        metrics = critic.train(0, part, old_values(part.samples, values), made_up(part.samples, 2))
        from colloid.training.megatron.model import named_parameters

        gradients = {name: p.main_grad.numpy().copy() for name, p in named_parameters(critic._chunks)}
        results[size] = {
            "values": by_sample(part.samples, values),
            "metrics": metrics,
            "head": gradients["value_head.weight"],
            "embedding": gradients["embedding.word_embeddings.weight"],
            "norm": gradients["decoder.final_layernorm.weight"],
        }
        critic.close()
    return results


def old_values(batch: RolloutBatch, values: np.ndarray) -> np.ndarray:
    """Some of which the new values are further away from than the clip range."""
    return values + 3 * CLIP * made_up(batch, 1)


def by_sample(batch: RolloutBatch, flat: np.ndarray) -> dict[int, np.ndarray]:
    parts = np.split(flat, batch.response_offsets[1:-1])
    return {int(key): part for key, part in zip(batch.sample_ids, parts, strict=True) if key >= 0}


def of_hugging_face(path: Path) -> dict[str, Any]:
    """The same in float64, by the formula, sample by sample."""
    model, batch = hf_model(path), make_rollout()
    head = head_weight(model.config.hidden_size).double().requires_grad_()
    rows, values, loss = [], {}, torch.zeros((), dtype=torch.float64)
    for row in range(batch.num_samples):
        tokens = batch.tokens[batch.offsets[row] : batch.offsets[row + 1]].astype(np.int64)
        at = slice(batch.response_offsets[row], batch.response_offsets[row + 1])
        length = at.stop - at.start
        hidden = model.model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).last_hidden_state[0]
        value = hidden[-length - 1 : -1] @ head[0]
        mask = torch.from_numpy(batch.loss_mask[at] == 1)
        values[int(batch.sample_ids[row])] = torch.where(mask, value, 0.0).detach().numpy()
        old = torch.where(mask, value, 0.0).detach() + 3 * CLIP * torch.from_numpy(made_up(batch, 1)[at]).double()
        wanted = torch.from_numpy(made_up(batch, 2)[at]).double()
        clipped = torch.minimum(torch.maximum(value, old - CLIP), old + CLIP)
        errors = torch.maximum((value - wanted) ** 2, (clipped - wanted) ** 2)
        rows.append(torch.stack([wanted, wanted - old])[:, mask].detach())
        if mask.any():
            loss = loss + errors[mask].mean() / batch.num_samples
    loss.backward()
    returns, left = torch.cat(rows, dim=1)
    return {
        "values": values,
        "loss": loss.item(),
        "explained": (1 - left.var() / returns.var()).item(),
        "head": head.grad.numpy(),
        "embedding": model.model.embed_tokens.weight.grad.numpy(),
        "norm": model.model.norm.weight.grad.numpy(),
    }


def learning(rank: int, world_size: int, init_method: str, model: Path) -> list[float]:
    """Explained variances of twenty rollouts whose returns follow from the tokens: does the critic learn those?"""
    critic = critic_of(
        Ranks(rank, world_size, init_method),
        model,
        head=False,
        lr=3e-3,
        num_rollout=20,
        actor_num_gpus_per_node=world_size,
    )
    explained = []
    for rollout in range(20):
        part = split(make_rollout(vocab=8), world_size, 4)[rank]
        batch = part.samples
        values, returns = critic.values(part), made_up(batch, 0)
        explained.append(critic.train(rollout, part, values, returns)["train/explained_variance"])
    critic.close()
    return explained


def one_rank(rank: int, world_size: int, init_method: str, model: Path, reference: Path) -> dict[str, Any]:
    """All of the below in one spawn."""
    return {
        "step": one_step(rank, world_size, f"{init_method}_step", model, [1, 8]),
        "explained": learning(rank, world_size, f"{init_method}_learning", model),
        "with policy": with_policy(rank, world_size, f"{init_method}_policy", model, reference),
    }


def with_policy(rank: int, world_size: int, init_method: str, model: Path, reference: Path) -> dict[str, Any]:
    """What a rollout in which only the critic learns does to the policy, and the returns before and after it."""
    ranks = Ranks(rank, world_size, init_method)
    part = split(make_rollout(num_steps=2), world_size, 2)[rank]
    critic = critic_of(ranks, model, num_steps_per_rollout=2)
    values = critic.values(part)
    critic.close()
    options = {"advantage_estimator": "ppo", "gamma": 0.9, "lambd": 0.8, "normalize_advantages": True}
    options |= {"kl_coef": 0.1, "ref_load": reference, "num_critic_only_steps": 1, "num_steps_per_rollout": 2}
    actor = ranks.actor(model, **options)
    before = actor.weight_checksums()
    only_critic, early = actor.train_with_critic(0, part, values)
    untouched = actor.weight_checksums() == before
    metrics, returns = actor.train_with_critic(1, part, values)
    result = {
        "returns": returns,
        "early returns": early,
        "only critic": only_critic,
        "untouched": untouched,
        "metrics": metrics,
    }
    actor.close()
    return result
