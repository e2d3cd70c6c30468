"""Rewards: the fast path agrees with math-verify; a grader that hangs, dies or raises costs its sample only."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from colloid import Sample
from colloid.errors import ConfigError
from colloid.rewards.math import fast_verdict, verify
from colloid.rewards.pool import GradingFailed, TookTooLong, WorkerPool
from colloid.rewards.random import random_reward
from colloid.rewards.registry import get_reward
from colloid.rollout.grading import Grader

HERE = "tests.unit.test_rewards"

DECIDED = [
    ("The answer is 12.", "12", True),
    (" 94.", "94", True),
    (" 94.<|im_end|>", "94", True),
    (" 2, which is the answer to", "2", None),
    ("15", "15.0", True),
    ("-3", "-3", True),
    ("-3", "3", False),
    ("I do not know", "7", False),
    ("", "7", False),
    ("so it is \\boxed{42}.", "42", True),
    ("so it is \\boxed{42}.", "41", False),
    ("first 3, then 4: \\boxed{0.5}", "0.5", True),
]
OPEN = [
    ("\\boxed{\\frac{1}{2}}", "0.5", True),
    ("$x = 5$", "5", True),
    ("3 + 4 = 7", "7", True),
    ("1/2", "\\frac{1}{2}", True),
    ("The final answer is $\\frac{2}{4}$", "1/2", True),
    ("1,000", "1000", True),
    ("\\boxed{(x+1)^2}", "x^2+2x+1", True),
    ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", True),
    ("\\boxed{7}", "\\frac{1}{2}", False),
    ("first \\boxed{3} and then \\boxed{4}", "5", False),
]


@pytest.mark.parametrize(("response", "label", "right"), DECIDED + OPEN)
def test_the_fast_path_never_contradicts_math_verify(response, label, right):
    verdict = fast_verdict(response, label)
    slow = verify(response, label) == 1.0
    assert verdict in (None, slow)
    if right is not None:
        assert slow is right
    if (response, label, right) in OPEN:
        assert verdict is None
    elif right is not None:
        assert verdict is right


def test_the_random_reward_is_a_function_of_seed_and_sample():
    values = [random_reward(1, index, "x") for index in range(200)]
    assert set(values) == {0.0, 1.0} and 60 < sum(values) < 140
    assert values == [random_reward(1, index, "x") for index in range(200)]


def test_an_unknown_reward_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'maths'.*math, dapo.*boxed_"):
        get_reward("maths")


def double(value):
    return 2 * value


def raise_error():
    raise ValueError("no good")


def raise_timeout():
    raise asyncio.TimeoutError("the database did not answer")


async def give_up(seconds):
    await asyncio.wait_for(asyncio.sleep(1000), seconds)


def block(seconds):
    time.sleep(seconds)
    return "late"


def leave(code):
    os._exit(code)


def be_killed_once(been):
    if os.path.exists(been):
        return "alive"
    open(been, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)


def print_and_return(value):
    print("noise on stdout", flush=True)
    return value


async def wait(seconds):
    await asyncio.sleep(seconds)
    return seconds


def process_id():
    return os.getpid()


def with_pool(run, **options):
    async def body():
        pool = WorkerPool(options.pop("size", 1), **options)
        try:
            return await run(pool)
        finally:
            await pool.close()

    return asyncio.run(body())


def test_a_call_runs_in_another_process_and_its_worker_is_used_again():
    async def run(pool):
        assert await pool.run(f"{HERE}:double", (21,), 30) == 42
        assert await pool.run(f"{HERE}:print_and_return", ([1, "a"],), 30) == [1, "a"]
        return [await pool.run(f"{HERE}:process_id", (), 30) for _ in range(2)]

    first, second = with_pool(run)
    assert first == second != os.getpid()


def test_a_call_that_blocks_forever_is_killed_and_its_place_comes_back():
    async def run(pool):
        with pytest.raises(GradingFailed, match="took longer than 0.3 s"):
            await pool.run(f"{HERE}:block", (1000,), 0.3)
        assert pool.num_killed == 1
        return await pool.run(f"{HERE}:double", (2,), 30)

    assert with_pool(run, preload=(f"{HERE}:double", (1,))) == 4


def test_what_raises_or_dies_fails_alone():
    async def run(pool):
        with pytest.raises(GradingFailed, match="ValueError: no good") as raised:
            await pool.run(f"{HERE}:raise_error", (), 30)
        assert "raise_error" in raised.value.traceback
        with pytest.raises(GradingFailed, match="ended with code 3"):
            await pool.run(f"{HERE}:leave", (3,), 30)
        with pytest.raises(GradingFailed, match="JSON"):
            await pool.run("builtins:object", (), 30)
        return await pool.run(f"{HERE}:double", (2,), 30)

    assert with_pool(run) == 4


def test_a_call_whose_worker_is_killed_from_outside_is_made_again(tmp_path):
    been = tmp_path / "been"
    assert with_pool(lambda pool: pool.run(f"{HERE}:be_killed_once", (str(been),), 30)) == "alive"
    assert been.exists()


def test_a_functions_own_time_limit_is_not_taken_for_the_calls():
    """Else so many of them in a row would be taken for a function that hangs."""

    async def run(pool):
        for target, args, reason in (("raise_timeout", (), "the database did not answer"), ("give_up", (0.01,), "")):
            with pytest.raises(GradingFailed, match=f"TimeoutError: {reason}") as raised:
                await pool.run(f"{HERE}:{target}", args, 30)
            assert not isinstance(raised.value, TookTooLong)

    with_pool(run)


def test_coroutines_share_a_worker_and_one_that_hangs_is_cancelled_alone():
    async def run(pool):
        started = time.monotonic()
        calls = [pool.run(f"{HERE}:wait", (0.3,), 30) for _ in range(20)]
        hanging = asyncio.ensure_future(pool.run(f"{HERE}:wait", (1000,), 0.5))
        assert await asyncio.gather(*calls) == [0.3] * 20
        with pytest.raises(GradingFailed, match="time limit"):
            await hanging
        assert pool.num_killed == 0
        return time.monotonic() - started

    assert with_pool(run, tasks_per_worker=64, preload=(f"{HERE}:double", (1,))) < 20 * 0.3 + 10


def test_the_time_of_a_call_counts_from_when_it_begins(monkeypatch):
    """Ten blocking calls in one worker, each within its limit, all together beyond it."""
    monkeypatch.setattr("colloid.rewards.pool.GRACE", 0.0)

    async def run(pool):
        results = await asyncio.gather(*(pool.run(f"{HERE}:block", (0.4,), 3.0) for _ in range(10)))
        assert pool.num_killed == 0
        return results

    assert with_pool(run, tasks_per_worker=64) == ["late"] * 10


def test_innocent_calls_survive_one_that_blocks_their_worker():
    async def run(pool):
        blocking = asyncio.ensure_future(pool.run(f"{HERE}:block", (1000,), 0.3))
        await asyncio.sleep(0)
        others = [pool.run(f"{HERE}:wait", (0.01,), 5) for _ in range(3)]
        results = await asyncio.gather(blocking, *others, return_exceptions=True)
        assert isinstance(results[0], GradingFailed)
        return results[1:]

    assert with_pool(run, tasks_per_worker=8, preload=(f"{HERE}:double", (1,))) == [0.01] * 3


def test_a_pool_starts_no_more_workers_than_it_may_and_none_before_the_first_call():
    async def run(pool):
        assert not pool._workers
        results = await asyncio.gather(*(pool.run(f"{HERE}:process_id", (), 30) for _ in range(12)))
        return len(set(results))

    assert with_pool(run, size=2) <= 2


def test_a_failed_preload_fails_the_call_with_its_reason():
    async def run(pool):
        with pytest.raises(GradingFailed, match="no good"):
            await pool.run(f"{HERE}:double", (2,), 30)

    with_pool(run, preload=(f"{HERE}:raise_error", ()))


def test_a_worker_that_does_not_start_in_time_is_killed_and_named(monkeypatch):
    monkeypatch.setattr("colloid.rewards.pool.START_TIMEOUT", 0.5)

    async def run(pool):
        with pytest.raises(TookTooLong, match="did not start: it was not ready after 0.5 s"):
            await pool.run(f"{HERE}:double", (2,), 30)
        assert pool.num_killed == 1 and not pool._workers

    with_pool(run, preload=(f"{HERE}:block", (1000,)))


def test_a_worker_that_is_being_started_when_the_pool_closes_is_killed_too():
    async def body():
        pool = WorkerPool(1)
        call = asyncio.ensure_future(pool.run(f"{HERE}:block", (1000,), 60))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(GradingFailed, match="the pool was closed"):
            await asyncio.wait_for(call, 5)
        assert not pool._workers

    asyncio.run(body())


def graded(samples, **options):
    async def body():
        grader = Grader(**{"rm_type": None, "workers": 1, **options})
        try:
            await asyncio.gather(*(grader.grade(sample) for sample in samples))
        finally:
            await grader.close()

    asyncio.run(body())
    return samples


def finished(response, label="4", **fields):
    return Sample(index=0, response=response, label=label, status=Sample.Status.COMPLETED, **fields)


def test_math_is_graded_by_both_paths():
    samples = graded([finished("4"), finished("5"), finished("$\\frac{8}{2}$")], rm_type="math")
    assert [sample.reward for sample in samples] == [1.0, 0.0, 1.0]


def test_a_samples_metadata_chooses_its_reward():
    (sample,) = graded([finished("5", metadata={"rm_type": "random"})], rm_type="math", seed=2)
    assert sample.reward == random_reward(2, 0, "5")


REWARD_FILE = """
import asyncio

async def reward_func(args, sample, **kwargs):
    kind = sample.response
    sample.metadata["seen"] = args.word
    if kind == "raise":
        raise RuntimeError("judge is broken")
    if kind == "sleep":
        await asyncio.sleep(1000)
    return {"none": None, "text": "1", "nan": float("nan"), "good": 0.5, "bool": True}[kind]
"""


class Options:
    word = "hello"


def test_a_custom_reward_sees_args_and_sample_and_whatever_is_no_number_fails(tmp_path, caplog):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD_FILE)
    kinds = ["good", "bool", "raise", "none", "text", "nan", "sleep"]
    samples = [finished(kind) for kind in kinds]
    graded(samples, custom_path=str(path), hook_args=Options(), timeout=2.0)
    assert [sample.reward for sample in samples] == [0.5, 1.0, None, None, None, None, None]
    assert [s.status is Sample.Status.FAILED for s in samples] == [False, False, True, True, True, True, True]
    assert samples[0].metadata == {"seen": "hello"}
    assert "judge is broken" in samples[2].metadata["error"] and "my_reward.py" in samples[2].metadata["error"]
    assert "Traceback" in caplog.text


def test_a_dict_reward_needs_its_key(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text('def reward_func(args, sample):\n    return {"acc": 1, "form": 0}\n')
    (sample,) = graded([finished("x")], custom_path=str(path), reward_key="acc")
    assert sample.reward == {"acc": 1, "form": 0}
    with pytest.raises(ConfigError, match=r"\['acc', 'form'\].*--reward-key is None"):
        graded([finished("x")], custom_path=str(path))
