"""Rewards of one's own in whole rollouts, with the real manager; and what is refused before anything starts."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from colloid.config import parse
from colloid.errors import ColloidError
from colloid.rollout.manager import RolloutManager
from tests.fake_engine import FakeEngine, seeded

ROWS = [{"prompt": f"What is {number}?", "label": str(number)} for number in range(6)]


@pytest.fixture
def manager_of(tiny_model_dir, tmp_path):
    """`manager_of(reward file or None, *flags, rows=…)` -> a manager, as a run makes it."""

    def make(text, *flags, rows=ROWS):
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if text is not None:
            (tmp_path / "judge.py").write_text(text)
            flags = ("--custom-rm-path", tmp_path / "judge.py", *flags)
        base = [
            *("--hf-checkpoint", str(tiny_model_dir()), "--rollout-batch-size", "3", "--n-samples-per-prompt", "2"),
            *("--rollout-max-response-len", "6", "--num-rollout", "1", "--outputs-dir", str(tmp_path / "outputs")),
            *("--prompt-data", str(tmp_path / "data.jsonl")),
        ]
        return RolloutManager(parse([*base, *map(str, flags)], "train"))

    return make


def rollout(manager):
    engine = FakeEngine(lambda payload: [40 + seeded(payload, 5), 50])

    async def body():
        async with engine.serve():
            await manager.start(engine.url, [engine.url], "key")
            try:
                return await manager.generate(0, 1)
            finally:
                await manager.close()

    return asyncio.run(body())


GROUPS = """
async def reward_func(args, samples, **kwargs):
    assert len({one.group_index for one in samples}) == 1, "one group"
    return [float(len(samples) + args.n_samples_per_prompt) for one in samples]
"""
BATCHES = """
calls = 0

def reward_func(prompts, responses, label, **columns):
    global calls
    calls += 1
    if len(prompts) != 2 or len(set(prompts)) != 1:
        raise ValueError(f"not a group: {prompts}")
    return [calls if number == 0 else None for number in range(2)]
"""


@pytest.mark.timeout(90)
def test_a_group_is_judged_at_once_and_equal_rewards_are_an_alarm(manager_of, caplog):
    with caplog.at_level(logging.WARNING):
        result = rollout(manager_of(GROUPS, "--group-rm"))
    assert (result.metrics["rollout/raw_reward"], result.metrics["rollout/zero_std_groups"]) == (4.0, 1.0)
    assert "rewards of all 6 samples are 4" in caplog.text


@pytest.mark.timeout(90)
def test_where_runs_repeat_a_batch_is_a_group_and_a_sample_that_fails_is_counted(manager_of):
    result = rollout(manager_of(BATCHES, "--deterministic"))
    assert result.metrics["rollout/num_failed_samples"] == 3
    assert result.metrics["rollout/raw_reward/max"] == 3.0, "three calls, one a group"


@pytest.mark.timeout(90)
def test_where_all_rewards_fail_the_run_ends_with_the_reason(manager_of):
    with pytest.raises(ColloidError, match="all 6 samples of rollout 0 FAILED.*judge.py.*no judge today"):
        rollout(manager_of("def reward_func(args, sample):\n    raise RuntimeError('no judge today')\n"))


MODEL = "class Model:\n    def __init__(self{}): ...\n    def compute_reward(self, prompts, responses): ...\n"


@pytest.mark.parametrize(
    ("text", "flags", "row", "words"),
    [
        ("def f(args, samples): ...\n", (), {}, "--group-rm"),
        ("def f(args, sample): ...\n", ("--group-rm",), {}, "whole groups"),
        ("def f(args, sample): ...\n", ("--custom-rm-weights", 1), {}, "added up"),
        ("def f(args, sample): ...\n", ("--custom-rm-model-path", "m"), {}, "needs a class"),
        (MODEL.format(""), ("--custom-rm-model-path", "m"), {}, "takes no path"),
        ("class A: ...\n", (), {}, "judge.py"),
        (None, (), {"metadata": {"rm_type": "maths"}}, "data.jsonl:1: unknown reward type 'maths'"),
        (None, (), {"metadata": {"rm_type": "remote_rm"}}, "data.jsonl:1.*--rm-url"),
        (None, ("--rm-type", "ifbench"), {}, "data.jsonl:1.*instruction_id_list"),
        (None, ("--rm-type", "boxed_dapo"), {"label": None}, "data.jsonl:1: no label"),
        (None, ("--custom-reward-post-process-path", "no.py"), {}, "no.py"),
    ],
)
def test_what_cannot_be_rewarded_is_refused_before_anything_starts(manager_of, text, flags, row, words):
    with pytest.raises(ColloidError, match=f"(?s){words}"):
        manager_of(text, *flags, rows=[{**ROWS[0], **row}, *ROWS])
