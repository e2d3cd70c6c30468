"""The user's rewards: classes, functions of batches, whole groups; a judge that misbehaves costs its samples only."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from colloid import Sample
from colloid.errors import HookError
from colloid.rewards.forms import Form, reward_form
from colloid.rollout.grading import Grader

LIMIT = 1.0
"""Seconds for one sample here."""

JUDGE = """
import time, os

def value(response):
    if response == "raise":
        raise RuntimeError("judge is broken")
    if response == "sleep":
        time.sleep(1000)
    if response == "die":
        os._exit(3)
    return {"none": None, "text": "1", "nan": float("nan"), "object": object()}.get(response, 0.5)

def _values(responses):
    if "few" in responses:
        return [0.5] * (len(responses) - 1)
    if "number" in responses:
        return 0.5
    return [value(response) for response in responses]
"""
FORMS = {
    "model": """
class CustomRewardModel:
    def __init__(self, model_path):
        self.model_path = model_path

    def compute_reward(self, prompts, responses):
        return _values(responses)
""",
    "batch": "def reward_func(prompts, responses, **columns):\n    return _values(responses)\n",
    "group": "async def reward_func(args, samples, **kwargs):\n    return _values([one.response for one in samples])\n",
}
BAD = {
    "raise": "judge is broken",
    "none": "None",
    "text": "'1'",
    "nan": "nan",
    "object": "object",
}


def finished(response, index=0, **fields):
    fields = {"label": "4", **fields}
    return Sample(index=index, group_index=0, response=response, status=Sample.Status.COMPLETED, **fields)


def grader_for(path, **options):
    return Grader(**{"rm_type": None, "workers": 1, "timeout": LIMIT, "custom_path": path, **options})


def graded(grader, *batches, group=False):
    """Grades the batches one after another, all samples of one at a time."""

    async def body():
        try:
            for samples in batches:
                if group:
                    await grader.grade_group(samples)
                else:
                    await asyncio.gather(*(grader.grade(sample) for sample in samples))
        finally:
            await grader.close()

    asyncio.run(body())
    return batches[0]


@pytest.fixture
def judge(tmp_path, monkeypatch):
    monkeypatch.setattr("colloid.rewards.pool.GRACE", 0.1)

    def write(text, name="judge.py"):
        path = tmp_path / name
        path.write_text(JUDGE + text)
        return str(path)

    return write


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_reward_fails_its_sample_by_name_and_the_next_call_works(judge, form):
    """Each kind in a call of its own, beside a good sample, and then a good one: the worker's slot came back."""
    batches = [[finished(kind, 1), finished("good", 2)] for kind in BAD]
    grader = grader_for(judge(FORMS[form]), group_rm=form == "group")
    graded(grader, *batches, [finished("good", 3)], group=form == "group")
    whole_call = {"raise"} if form == "group" else set()  # It cannot be told which sample of a group it was.
    for (bad, good), (kind, reason) in zip(batches, BAD.items(), strict=True):
        assert bad.status is Sample.Status.FAILED and bad.reward is None
        assert reason in bad.metadata["error"] and "judge.py" in bad.metadata["error"]
        assert (good.reward is None) == (kind in whole_call), kind


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS)
def test_too_few_values_fail_all_samples_of_the_call(judge, form):
    few, number = [finished("few", 1), finished("good", 2)], [finished("number", 3)]
    last = [finished("good", 4)]
    graded(grader_for(judge(FORMS[form]), group_rm=form == "group"), few, number, last, group=form == "group")
    assert all(sample.status is Sample.Status.FAILED for sample in few + number) and last[0].reward == 0.5
    assert "1 values for 2 samples" in few[0].metadata["error"]
    assert "must return a list" in number[0].metadata["error"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS)
def test_a_judge_that_never_ends_or_dies_is_replaced(judge, form):
    group = form == "group"
    slow = [finished("sleep", 1), finished("good", 2), finished("good", 3)]
    dead, last = [finished("die", 4)], [finished("good", 5)]
    graded(grader_for(judge(FORMS[form]), group_rm=group), slow, dead, last, group=group)
    assert slow[0].status is Sample.Status.FAILED and "took longer" in slow[0].metadata["error"]
    assert [sample.reward for sample in slow[1:]] == [None if group else 0.5] * 2
    assert "ended with code 3" in dead[0].metadata["error"] and last[0].reward == 0.5


@pytest.mark.timeout(60)
def test_a_judge_that_hangs_as_such_does_not_hold_up_all_samples_and_is_asked_again(judge):
    """Forty samples, each of which would take its time limit, one after another."""
    samples, good = [finished("sleep", number) for number in range(40)], finished("good", 41)
    path = judge("def reward_func(args, sample):\n    return value(sample.response)\n")
    grader = grader_for(path, timeout=0.3)
    asked = []
    run = grader._custom._judge(path).pool._start

    async def start():
        asked.append(1)
        return await run()

    grader._custom._judge(path).pool._start = start
    graded(grader, samples, [good])
    assert all(sample.status is Sample.Status.FAILED for sample in samples) and good.reward == 0.5
    assert any("was not made" in sample.metadata["error"] for sample in samples)
    assert len(asked) < 20


MODEL = """
class CustomRewardModel:
    made = 0

    def __init__({parameters}):
        type(self).made += 1
        self.path = {path}

    def compute_reward(self, prompts, responses):
        calls.append(len(responses))
        return [float(len(calls) * 1000 + type(self).made * 100 + len(self.path + response)) for response in responses]

calls = []
"""


@pytest.mark.timeout(60)
def test_a_model_is_made_once_and_called_with_all_that_waits(judge):
    path = judge(MODEL.format(parameters="self, model_path", path="model_path"))
    samples = [finished("x" * number, number) for number in range(40)]
    graded(grader_for(path, model_path="abc", timeout=30), samples)
    rewards = [int(sample.reward) for sample in samples]
    assert [reward % 100 for reward in rewards] == [3 + number for number in range(40)], "each got its own"
    assert {reward // 100 % 10 for reward in rewards} == {1}, "made once"
    assert max(reward // 1000 for reward in rewards) <= 3, "in few calls"


@pytest.mark.timeout(60)
def test_a_class_without_parameters_is_made_without(judge):
    path = judge(MODEL.format(parameters="self", path="''"))
    (sample,) = graded(grader_for(path, model_path="abc", timeout=30), [finished("xy")])
    assert int(sample.reward) % 100 == 2


@pytest.mark.timeout(60)
def test_a_function_of_batches_gets_the_columns_it_declares_and_messages_where_prompts_are_messages(judge):
    path = judge("""
def one(completions, label, level, missing=None, **kwargs):
    assert missing is None and set(kwargs) == {"prompts", "responses", "note"}, kwargs
    texts = [item if isinstance(item, str) else item[0]["content"] + item[0]["role"] for item in completions]
    return [float(len(text)) + 100 * int(number) + 1000 * (rank or 0)
            for text, number, rank in zip(texts, label, level)]

def length(responses):
    return [len(response) for response in responses]
""")
    samples = [
        finished("ab", 0, metadata={"level": 1}),
        finished("abc", 1, label="5", metadata={"note": "x"}, prompt=[{"role": "user", "content": "q"}]),
    ]
    graded(grader_for(f"{path}:one", timeout=30, group_rm=True), samples, group=True)
    assert [sample.reward for sample in samples] == [2 + 400 + 1000, 3 + 9 + 500]
    (sample,) = graded(
        grader_for([f"{path}:one", f"{path}:length"], custom_weights=[0.5, 10], timeout=30),
        [finished("ab", metadata={"level": 1, "note": 2})],
    )
    assert sample.reward == {"one": 1402.0, "length": 2.0, "score": 721.0}
    assert sample.get_reward_value() == 721.0 and sample.get_reward_value("length") == 2.0


@pytest.mark.timeout(60)
def test_a_group_is_judged_together_and_its_changes_come_back(judge):
    path = judge("""
async def reward_func(args, samples, **kwargs):
    best = max(len(one.response) for one in samples)
    for one in samples:
        one.metadata["rank"] = len(one.response)
    return [{"acc": float(len(one.response) == best), "n": len(samples)} for one in samples]
""")
    failed = finished("x" * 9, 9)
    failed.status = Sample.Status.FAILED
    given = finished("x", 8, reward={"acc": 0.25})
    samples = [finished("x" * number, number) for number in (1, 3, 2)]
    graded(grader_for(path, group_rm=True, reward_key="acc", timeout=30), [*samples, failed, given], group=True)
    assert [sample.reward["acc"] for sample in samples] == [0.0, 1.0, 0.0]
    assert [sample.metadata["rank"] for sample in samples] == [1, 3, 2]
    assert samples[0].reward["n"] == 3 and failed.reward is None and given.reward == {"acc": 0.25}


@pytest.mark.timeout(60)
def test_the_experts_that_an_engine_chose_are_kept_here_and_not_sent_to_the_judge(judge):
    path = judge("""
async def one(args, sample):
    return float(sample.rollout_routed_experts is None)

async def all_of_them(args, samples):
    return [float(one.rollout_routed_experts is None) for one in samples]
""")
    for name in ("one", "all_of_them"):
        group = name == "all_of_them"
        sample = finished("x", rollout_routed_experts=np.zeros((3, 2, 1), dtype=np.int16))
        graded(grader_for(f"{path}:{name}", group_rm=group, timeout=30), [sample], group=group)
        assert sample.reward == 1.0 and sample.rollout_routed_experts.shape == (3, 2, 1)


def test_forms_are_told_apart_by_their_parameters(judge):
    path = judge("""
async def single(args, sample, **kw): ...
async def many(args, samples, **kw): ...
def trl(completions, **kwargs): ...
def trl_with_column(prompts, completions, answer): ...
def own(prompts, responses): ...
class Model:
    def compute_reward(self, prompts, responses): ...
class Other: ...
""")
    forms = {"single": Form.SAMPLE, "trl": Form.BATCH, "trl_with_column": Form.BATCH, "own": Form.BATCH}
    for name, form in {**forms, "Model": Form.MODEL}.items():
        assert reward_form(f"{path}:{name}") is form
    assert reward_form(f"{path}:many", group_rm=True) is Form.GROUP
    for name, group_rm, words in [
        ("many", False, "--group-rm"),
        ("single", True, "samples"),
        ("Other", False, "lacks"),
    ]:
        with pytest.raises(HookError, match=words):
            reward_form(f"{path}:{name}", group_rm)


def test_a_bare_file_with_one_class_or_function_of_batches_is_enough(judge):
    assert reward_form(judge("class Scorer:\n    def compute_reward(self, prompts, responses): ...\n", "a.py"))
    assert reward_form(judge("def accuracy(prompts, completions, answer, **kw): ...\n", "b.py")) is Form.BATCH
