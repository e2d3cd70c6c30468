"""Arguments and made-up rollouts for trainer tests, and the same training on a plain Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from colloid.config import parse
from colloid.data.batch import RankBatch, RolloutBatch
from colloid.data.columns import to_columns
from colloid.data.sample import Sample
from colloid.data.schedule import Bounds, build_rank_batches

TEMPERATURE = 0.8


def make_args(model: Path, **options: Any) -> Any:
    """Parsed options of a run on `model`: a learning rate that shows; `options` by name, True for a bare flag."""
    data = model / "prompts.jsonl"
    if not data.exists():
        data.write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    chosen = {
        "hf_checkpoint": model,
        "prompt_data": data,
        "rm_type": "math",
        "device": "cpu",
        "lr": 1e-3,
        "adam_eps": 1e-4,
        "rollout_temperature": TEMPERATURE,
        "num_rollout": 8,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
    } | options
    argv = []
    for name, value in chosen.items():
        argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return parse(argv)


def make_rollout(
    seed: int = 0, *, num_steps: int = 1, per_token: bool = False, vocab: int = 512, taught: bool = False
) -> RolloutBatch:
    """Eight samples of uneven lengths with tool tokens, a removed sample and one with an advantage of 0.

    Args:
        taught: with log-probs of a teacher.
    """
    random = np.random.default_rng(seed)
    samples = []
    for index in range(8):
        sample = Sample(index=index, group_index=index // 2, tokens=random.integers(0, vocab, 3 + index % 4).tolist())
        for length, trained in ((2 + int(random.integers(0, 9)), True), (3, False), (2, True)):
            if length > 3 or trained or index in (1, 6):
                log_probs = None if index == 3 else (-6 + random.normal(size=length)).tolist()
                sample.append_response_tokens(
                    random.integers(0, vocab, length).tolist(),
                    log_probs=log_probs if trained else None,
                    trained=trained,
                )
        sample.remove_sample = index == 5
        sample.status = Sample.Status.COMPLETED
        samples.append(sample)
    rewards = random.normal(size=8)
    rewards[2] = 0.0
    for sample in samples if taught else ():
        sample.teacher_log_probs = (-6 + random.normal(size=sample.response_length)).tolist()
    return to_columns(samples, raw_rewards=rewards, rewards=rewards, num_steps=num_steps, per_token_loss=per_token)


def split(batch: RolloutBatch, ranks: int, micro_batch_size: int, *, only_gradient: bool = False) -> list[RankBatch]:
    """The batch for each data-parallel rank."""
    has_gradient = batch.rewards != 0 if only_gradient else np.ones(batch.num_samples, dtype=bool)
    return build_rank_batches(
        batch,
        data_parallel_size=ranks,
        num_steps=int(batch.steps.max()) + 1,
        bounds=Bounds(micro_batch_size=micro_batch_size),
        has_gradient=has_gradient,
    )


def hf_log_probs(model: torch.nn.Module, tokens: np.ndarray, response_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [response length] of a sample's response and entropies, by the formula, sample by sample."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, -response_length - 1 : -1] / TEMPERATURE
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, ids[0, -response_length:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def hf_loss(
    model: torch.nn.Module,
    batch: RolloutBatch,
    *,
    step: int = 0,
    old: torch.nn.Module | None = None,
    reference: torch.nn.Module | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> torch.Tensor:
    """GRPO as in the formulas: the mean over a rollout's tokens, then over the rollouts of the step.

    Args:
        old: the behaviour policy; None: the model itself.
    """
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    rows = np.flatnonzero(batch.steps == step)
    for row in rows:
        tokens = batch.tokens[batch.offsets[row] : batch.offsets[row + 1]]
        mask = torch.from_numpy(batch.loss_mask[batch.response_offsets[row] : batch.response_offsets[row + 1]] == 1)
        if not mask.any():
            continue
        log_probs, entropy = hf_log_probs(model, tokens, len(mask))
        with torch.no_grad():
            behaviour = hf_log_probs(old, tokens, len(mask))[0] if old else log_probs.detach()
            wanted = hf_log_probs(reference, tokens, len(mask))[0] if reference else log_probs.detach()
        ratio, advantage = (log_probs - behaviour).exp(), float(batch.rewards[row])
        loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage) - entropy_coef * entropy
        k = log_probs - wanted
        loss = loss + kl_coef * ((-k).exp() - 1 + k).clamp(-10, 10)
        total = total + loss[mask].mean() / len(rows)
    return total


def hf_model(path: Path) -> torch.nn.Module:
    """transformers' own model in float64."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
