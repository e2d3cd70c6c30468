"""Memory that is released by tag and taken again, as colocation asks for it."""

from __future__ import annotations

import pytest

from tests.engine.contract.test_control import send

pytestmark = pytest.mark.timeout(900)  # of the first test, most of it for the start of SGLang
PROMPT = [5, 17, 99, 200]


def test_what_is_released_is_resumed_and_generates_the_same(engine):
    greedy = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    before = engine.generate(PROMPT, **greedy)["output_ids"]
    engine.post("/pause_generation", {"mode": "retract"})
    engine.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    engine.post("/resume_memory_occupation", {"tags": ["weights"]})
    send(engine, 40, 1.0)
    engine.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    engine.post("/continue_generation")
    assert engine.generate(PROMPT, **greedy)["output_ids"] == before
    assert engine.call("GET", "/model_info").json()["weight_version"] == "40"


@pytest.mark.parametrize("tags", [["no_such_tag"], "weights and more", 5], ids=str)
def test_tags_that_are_none_are_refused(engine, tags):
    if engine.kind == "sglang" and tags == ["no_such_tag"]:
        pytest.skip("SGLang does nothing for a tag that it does not know")
    answer = engine.call("POST", "/release_memory_occupation", {"tags": tags})
    assert 400 <= answer.status_code < 500, answer.text[:300]
