"""Dynamic filters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from colloid import DynamicFilterOutput, Sample
from colloid.errors import HookError
from colloid.rollout.filters import check_reward_nonzero_std, filter_output, load_filter

ARGS = SimpleNamespace(reward_key=None)


def group(*rewards):
    status = Sample.Status
    return [
        Sample(index=i, group_index=0, reward=reward, status=status.FAILED if reward is None else status.COMPLETED)
        for i, reward in enumerate(rewards)
    ]


def test_a_group_of_equal_rewards_is_dropped_and_may_fill_up():
    assert check_reward_nonzero_std(ARGS, group(0.0, 1.0)).keep
    verdict = check_reward_nonzero_std(ARGS, group(1.0, 1.0))
    assert verdict == DynamicFilterOutput(False, reason="zero_std_1", keep_when_insufficient=True)
    assert not check_reward_nonzero_std(ARGS, group(0.1 + 0.2, 0.3)).keep


def test_a_failed_sample_has_no_vote():
    assert not check_reward_nonzero_std(ARGS, group(1.0, None)).keep
    assert check_reward_nonzero_std(ARGS, group(None, None)).reason == "all_failed"


def test_a_filter_may_return_a_bool_and_nothing_else():
    assert filter_output(True, "f").keep and not filter_output(False, "f").keep_when_insufficient
    with pytest.raises(HookError, match="f must return.*returned None"):
        filter_output(None, "f")


def test_a_filter_that_raises_is_named_with_its_sample(tmp_path):
    (tmp_path / "my_filter.py").write_text("def dynamic_filter(args, samples):\n    raise KeyError('x')\n")
    run = load_filter(str(tmp_path / "my_filter.py"), ARGS)
    with pytest.raises(HookError, match="my_filter.py.*group 0.*KeyError"):
        run(group(0.0, 1.0))
