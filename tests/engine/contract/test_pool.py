"""What a pool asks of an engine, whichever it is."""

from __future__ import annotations

from colloid.engines.control import EngineAddress
from colloid.engines.external import Expected, find_engine
from colloid.engines.health import Verdict, check_engine, counters
from tests.engine.contract.conftest import KEY


def test_it_is_found_by_its_address_with_its_kind_and_model(engine):
    expected = Expected("qwen3", engine.model.config.vocab_size, tuple(engine.model.config.architectures))
    assert find_engine(engine.url, KEY, expected) == EngineAddress(engine.url, engine.kind)


def test_it_is_healthy_idle_and_at_work(engine):
    address = EngineAddress(engine.url, engine.kind)
    assert check_engine(address, KEY, 30.0, generates=True).verdict is Verdict.HEALTHY
    request = engine.long("at work")
    assert check_engine(address, KEY, 30.0, generates=True).verdict is Verdict.HEALTHY
    running, tokens = counters(engine.control)
    assert tokens > 0 and (running >= 1 or engine.kind == "sglang")  # whose gauges lag behind
    engine.post("/abort_request", {"rid": "at work"})
    assert request.result["meta_info"]["finish_reason"]["type"] == "abort"


def test_one_that_is_not_there_is_lost():
    assert check_engine(EngineAddress("http://127.0.0.1:9"), KEY, 2.0).verdict is Verdict.LOST
