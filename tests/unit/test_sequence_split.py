"""Context and sequence parallelism of packs: every token has one owner, and padding changes nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.training.micro_batch import filled_up, make_micro_batch
from colloid.training.sequence_split import SequenceSplit
from tests.parallel.rollouts import make_rollout

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(lambda lengths: np.array(lengths))


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4, 128]))
def test_each_token_has_one_owner_and_all_ranks_have_equally_many(lengths, size, multiple):
    splits = [SequenceSplit(rank, size, multiple) for rank in range(size)]
    padded = splits[0].padded_lengths(lengths)
    assert (padded >= lengths).all()
    if size > 1:
        assert (padded % (2 * size) == 0).all()
    assert padded[:-1].tolist() == [-(-n // (2 * size)) * 2 * size if size > 1 else n for n in lengths[:-1]]
    owned = np.stack([split.owned(padded) for split in splits])
    assert (owned.sum(0) == 1).all()
    assert len(set(owned.sum(1).tolist())) == 1 and owned.sum(1)[0] % multiple == 0
    assert padded.sum() - lengths.sum() < len(lengths) * 2 * size + 2 * size * multiple


def test_a_sequence_is_dealt_out_zigzag():
    owned = [SequenceSplit(rank, 2).owned(np.array([8, 4])).nonzero()[0].tolist() for rank in range(2)]
    assert owned == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_context_parallel_ranks_predict_each_response_token_once_from_the_token_before_it():
    batch, rows = make_rollout(), np.array([4, 1, 6, 0])
    whole = make_micro_batch(batch, rows)
    seen = np.zeros(len(whole.loss_mask), dtype=int)
    for rank in range(2):
        part = make_micro_batch(batch, rows, split=SequenceSplit(rank, 2, 2))
        assert part.tokens.shape[1] % 2 == 0 and part.cu_seqlens[-1] == 2 * part.tokens.shape[1]
        here = part.response_rows
        seen[here.numpy()] += 1
        assert part.targets.tolist() == whole.targets[here].tolist()
        before = whole.tokens[0, whole.positions[here]]
        assert part.tokens[0, part.positions].tolist() == before.tolist()
        assert part.position_ids[0, part.positions].tolist() == whole.position_ids[0, whole.positions[here]].tolist()
        for name in ("sample_index", "loss_mask", "token_weights", "rewards"):
            assert getattr(part, name).tolist() == getattr(whole, name).tolist()
    assert (seen == 1).all()


def test_blank_micro_batches_fill_up_a_group_and_weigh_nothing():
    batch = make_rollout()
    micro_batches = [make_micro_batch(batch, np.array(rows)) for rows in ([0, 1], [2, 3], [4])]
    filled = filled_up(micro_batches, 2)
    assert filled[:3] == micro_batches and len(filled) == 4
    assert not filled[3].loss_mask.any() and not filled[3].token_weights.any()
    assert filled_up([], 2) == [] and filled_up(micro_batches, 3) == micro_batches
