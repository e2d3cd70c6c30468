"""What `docs/rewards.md` shows runs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from colloid import Sample
from colloid.errors import HookError
from colloid.rewards.forms import Form, reward_form
from colloid.rewards.registry import REWARDS
from colloid.rollout.grading import Grader
from colloid.rollout.post_process import post_processed

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text()


@pytest.fixture
def blocks(tmp_path):
    """The page's Python blocks, each in a file: path and text."""
    found = []
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)):
        path = tmp_path / f"block_{number}.py"
        path.write_text(text)
        found.append(str(path))
    return found


def samples(*responses):
    done = Sample.Status.COMPLETED
    return [Sample(index=i, group_index=0, response=r, label="4", status=done) for i, r in enumerate(responses)]


def test_the_page_names_every_grader():
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(REWARDS)


@pytest.mark.timeout(60)
def test_the_pages_functions_reward(blocks):
    single, model, batch, shaping = blocks
    assert reward_form(model) is Form.MODEL

    async def body(**options):
        grader = Grader(rm_type=None, workers=1, **options)
        done = samples("it is 4", "no")
        await asyncio.gather(*(grader.grade(sample) for sample in done))
        await grader.close()
        return done

    assert [one.reward["score"] for one in asyncio.run(body(custom_path=single))] == [1.0, 0.0]
    paths = [f"{batch}:right", f"{batch}:short"]
    done = asyncio.run(body(custom_path=paths, custom_weights=[1, 0.1]))
    assert [one.get_reward_value() for one in done] == pytest.approx([1 - 0.0007, -0.0002])

    args = SimpleNamespace(custom_reward_post_process_path=shaping)
    done = samples("a", "b", "c")
    for sample, reward in zip(done, (1.0, 3.0, None), strict=True):
        sample.reward = reward
    done[2].status = Sample.Status.FAILED
    raw, shaped = post_processed(args, done)
    assert raw[:2].tolist() == [1.0, 3.0] and raw[2] != raw[2]
    assert shaped.tolist() == pytest.approx([1 - 4 / 3, 3 - 4 / 3, 0.0])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [1.0]", "must return \\(raw_rewards, rewards\\)"),
        ("return [1.0], [1.0]", "one of raw_rewards for each of 2 samples, and returned 1"),
        ("return [1.0, 2.0], [1.0, float('nan')]", "rewards must be finite.*sample 1 is nan"),
        ("return [1.0, None], [1.0, 2.0]", "raw_rewards must be finite.*sample 1 is None"),
        ("raise RuntimeError('broken')", "post_process.*RuntimeError: broken"),
    ],
)
def test_a_function_that_shapes_wrongly_is_named(tmp_path, body, words):
    path = tmp_path / "shape.py"
    path.write_text(f"def post_process(args, samples):\n    {body}\n")
    with pytest.raises(HookError, match=words):
        post_processed(SimpleNamespace(custom_reward_post_process_path=str(path)), samples("a", "b"))
