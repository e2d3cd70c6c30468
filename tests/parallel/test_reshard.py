"""A checkpoint of one layout goes on under any other, as if nothing had been."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(900)  # The first test waits for all ranks.

RESUMED = [
    ("plain", "two_ranks_resumed"),
    ("plain", "one_rank_resumed"),
    ("distributed", "two_ranks_resumed"),
    ("distributed", "one_rank_resumed"),
    ("experts", "one_rank_resumed"),
]


@pytest.mark.parametrize(("name", "fixture"), RESUMED)
def test_next_step_is_the_same_under_another_layout(request, four_ranks, name, fixture):
    saved = four_ranks[0][name]
    ranks = request.getfixturevalue(fixture)
    assert not isinstance(ranks[0][name], str), ranks[0][name]
    assert ranks[0][name]["loaded"] == saved["saved"]
    assert difference(ranks[0][name]["weights"], saved["weights"]) < 1e-5
    for rank in ranks:
        resumed = rank[name]
        assert (resumed["state"].start_rollout_id, resumed["state"].weight_version) == (2, 0)
        for key in ("train/loss", "train/grad_norm", "train/lr"):
            assert resumed["next"][key] == pytest.approx(saved["next"][key], abs=1e-6, rel=1e-5), key


def test_checkpoint_written_in_the_background_is_that_of_the_moment_it_was_asked_for(four_ranks):
    saved = four_ranks[0]["distributed"]
    assert saved["returned before it was written"]
    assert saved["saved"] != saved["after"]


def test_weights_of_a_checkpoint_start_another_run(four_ranks, one_rank_resumed):
    started = one_rank_resumed[0]["started from it"]
    assert (started["state"].start_rollout_id, started["state"].weight_version) == (0, 0)
    assert started["loaded"] == four_ranks[0]["plain"]["saved"]


def test_reference_can_be_a_checkpoint(one_rank_resumed):
    # The policy is the reference, so that the KL between them is exactly 0.
    assert one_rank_resumed[0]["as reference"]["next"]["train/kl_loss"] == 0.0


def test_optimizer_can_be_started_anew(four_ranks, one_rank_resumed):
    fresh = one_rank_resumed[0]["without optimizer"]
    saved = four_ranks[0]["plain"]
    assert fresh["state"].start_rollout_id == 2
    assert fresh["loaded"] == saved["saved"]
    assert fresh["next"]["train/loss"] == pytest.approx(saved["next"]["train/loss"], abs=1e-6)
    assert difference(fresh["weights"], saved["weights"]) > 1e-4


def test_checkpoint_of_another_model_names_the_first_tensors_that_differ(one_rank_resumed):
    message = one_rank_resumed[0]["another model"]
    assert message.startswith("ConfigError: the checkpoint ")
    assert "decoder.layers.mlp.linear_fc1.weight is (4, 192, 64) where the model has (4, 256, 64)" in message
    assert "decoder.layers.mlp.linear_fc2.weight is (4, 64, 96) where the model has (4, 64, 128)" in message


def test_state_of_another_kind_of_optimizer_is_an_error_that_says_what_to_do(one_rank_resumed):
    message = one_rank_resumed[0]["another optimizer"]
    assert message.startswith("ConfigError") and "without --use-distributed-optimizer" in message
    assert "--no-load-optim" in message


def difference(found: dict, wanted: dict) -> float:
    assert found.keys() == wanted.keys()
    return max(float(abs(found[name] - wanted[name]).max()) for name in wanted)
