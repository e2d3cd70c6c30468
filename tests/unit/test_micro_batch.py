"""Packing rows of a batch; rotary frequencies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from colloid.errors import ConfigError
from colloid.training.micro_batch import make_micro_batch, regroup
from colloid.training.rope import scaled_frequencies
from tests.parallel.rollouts import make_rollout


def test_each_response_token_is_predicted_where_the_token_before_it_stands():
    batch = make_rollout()
    rows = np.array([4, 1, 6, 0])
    micro_batch = make_micro_batch(batch, rows)
    order = sorted(rows, key=lambda row: -batch.lengths[row])
    tokens = np.concatenate([batch.tokens[batch.offsets[row] : batch.offsets[row + 1]] for row in order])
    assert micro_batch.tokens[0].tolist() == tokens.tolist()
    assert micro_batch.cu_seqlens.tolist() == [0, *np.cumsum(batch.lengths[order])]
    assert micro_batch.max_length == batch.lengths[rows].max()
    assert torch.equal(micro_batch.tokens[0, micro_batch.positions + 1], micro_batch.targets)
    starts = micro_batch.cu_seqlens[:-1].repeat_interleave(micro_batch.cu_seqlens.diff())
    assert torch.equal(micro_batch.position_ids[0], torch.arange(len(tokens)) - starts)
    for place, row in enumerate(order):
        mine = micro_batch.sample_index == place
        segment = slice(batch.response_offsets[row], batch.response_offsets[row + 1])
        mask = batch.loss_mask[segment] == 1
        assert micro_batch.targets[mine].tolist() == tokens_of_response(batch, row)
        assert micro_batch.loss_mask[mine].tolist() == mask.tolist()
        assert micro_batch.rollout_log_probs[mine].numpy() == pytest.approx(
            batch.rollout_log_probs[segment], nan_ok=True
        )
        weights = np.where(mask, batch.loss_weights[row], 0).astype(np.float32)
        assert micro_batch.token_weights[mine].tolist() == weights.tolist()
        assert micro_batch.rewards[place] == batch.rewards[row]


def test_no_log_probs_of_the_engine_are_none():
    assert make_micro_batch(make_rollout(), np.array([3])).rollout_log_probs is None


def test_sample_without_a_prompt_is_refused():
    batch = make_rollout()
    batch.response_offsets[1:] += batch.lengths[0] - batch.response_lengths[0]
    with pytest.raises(ValueError, match=r"samples \[0\] have no prompt"):
        make_micro_batch(batch, np.array([0]))


def test_values_of_response_tokens_move_between_packs_of_the_same_samples():
    batch = make_rollout()
    values = torch.arange(len(batch.loss_mask)).float()
    large = [make_micro_batch(batch, rows) for rows in ([4, 1, 6, 0], [2, 5])]
    small = [make_micro_batch(batch, rows) for rows in ([0, 2], [5], [6, 1], [4])]
    found = regroup([values[pack.response_index] for pack in large], large, small)
    assert len(found) == 4
    for pack, of_pack in zip(small, found, strict=True):
        assert torch.equal(of_pack, values[pack.response_index])
        assert torch.equal(torch.from_numpy(batch.tokens)[_positions(batch)][of_pack.long()].long(), pack.targets)
    assert regroup([], large, small) == []


def _positions(batch) -> torch.Tensor:
    """int64 [R]: where each response token of the batch stands in `batch.tokens`."""
    ends = zip(batch.offsets[1:], batch.response_lengths, strict=True)
    return torch.cat([torch.arange(end - length, end) for end, length in ends])


def tokens_of_response(batch, row: int) -> list[int]:
    end = batch.offsets[row + 1]
    return batch.tokens[end - batch.response_lengths[row] : end].tolist()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 5.0,
            "original_max_position_embeddings": 4096,
        },
    ],
)
def test_rotary_frequencies_are_those_of_transformers(rope):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 500000.0} | rope
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=8192, rope_parameters=dict(rope)
    )
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    wanted = plain if rope["rope_type"] == "default" else ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")[0]
    torch.testing.assert_close(scaled_frequencies(plain, {"rope_parameters": rope}), wanted, rtol=1e-6, atol=0)


def test_unknown_rope_scaling_is_refused():
    with pytest.raises(ConfigError, match="'yarn' is not supported yet"):
        scaled_frequencies(torch.ones(4), {"rope_scaling": {"type": "yarn", "factor": 4.0}})
