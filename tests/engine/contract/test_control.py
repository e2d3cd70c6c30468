"""What both engines do when they are asked for facts, paused, aborted, and given weights."""

import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from colloid.engines.contract_memory import KV_CACHE, TAGS, WEIGHTS
from colloid.engines.memory import EngineMemory
from colloid.weights.buckets import make_buckets
from colloid.weights.check import check_weights
from colloid.weights.senders import SendOptions
from colloid.weights.transports import make_sender
from tests.engine.contract.conftest import KEY, output_log_probs

pytestmark = pytest.mark.timeout(900)  # of the first test, most of it for the start of SGLang
PROMPT = [5, 17, 99, 200]
MODES = ("in_place", "retract")


def named_tensors(engine, factor: float = 1.0):
    """The model's tensors, scaled; as the trainer sends them."""
    return [(name, tensor * factor) for name, tensor in load_file(engine.model_dir / "model.safetensors").items()]


def send(engine, version: int, factor: float, mode: str = "retract", *, transport: str = "tensor"):
    place = Path(tempfile.mkdtemp(prefix="weights-"))
    options = SendOptions(transport, "full", 1 << 16, mode, engine.model_dir, place, engine=engine.kind)
    sender = make_sender(options)
    try:
        return sender.send([engine.control], version, iter(named_tensors(engine, factor)))
    finally:
        sender.close()
        shutil.rmtree(place)


def test_facts(engine):
    info = engine.call("GET", "/model_info").json()
    assert info["model_path"] and "weight_version" in info
    server = engine.call("GET", "/server_info").json()
    assert server["tp_size"] == 1 and server["max_total_num_tokens"] >= 1000
    assert isinstance(server["internal_states"], list)
    for old, new in (("/get_model_info", "/model_info"), ("/get_server_info", "/server_info")):
        assert engine.call("GET", old).json().keys() == engine.call("GET", new).json().keys()
    assert engine.call("GET", "/v1/models").json()["data"][0]["id"]
    assert engine.call("GET", "/health_generate").status_code == 200
    assert engine.call("GET", "/no_such_path").status_code == 404


def test_the_cache_is_flushed(engine):
    prompt = list(range(20, 84))
    engine.generate(prompt, max_new_tokens=1)
    engine.post("/flush_cache")
    assert engine.generate(prompt, max_new_tokens=1)["meta_info"]["cached_tokens"] == 0


def test_an_abort_by_id_answers_with_the_tokens_so_far(engine):
    request = engine.long("to abort")
    engine.post("/abort_request", {"rid": "nobody's"})
    engine.post("/abort_request", {"rid": "to abort"})
    meta = request.result["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < len(request.result["output_ids"]) == len(meta["output_token_logprobs"]) < 4000


def test_abort_all(engine):
    requests = [engine.long(f"request {index}") for index in range(3)]
    engine.post("/abort_request", {"abort_all": True})
    assert [request.result["meta_info"]["finish_reason"]["type"] for request in requests] == ["abort"] * 3


@pytest.mark.parametrize("mode", MODES)
def test_a_paused_request_goes_on_afterwards(engine, mode):
    request = engine.long("paused")
    engine.post("/pause_generation", {"mode": mode})
    time.sleep(0.5)
    before = engine.num_generated
    time.sleep(0.5)
    assert engine.num_generated == before
    engine.post("/continue_generation")
    deadline = time.monotonic() + 30
    while engine.num_generated < before + 3:
        assert time.monotonic() < deadline, "it does not go on"
        time.sleep(0.05)
    engine.post("/abort_request", {"rid": "paused"})
    answer = request.result
    ids = answer["output_ids"]
    torch.testing.assert_close(output_log_probs(answer), engine.log_probs([5, 6, 7], ids), atol=5e-4, rtol=0)


def test_a_pause_that_aborts_answers_at_once(engine):
    request = engine.long("aborted by the pause")
    engine.post("/pause_generation", {"mode": "abort"})
    assert request.result["meta_info"]["finish_reason"]["type"] == "abort"
    engine.post("/continue_generation")
    assert engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True)["meta_info"]["completion_tokens"] == 2


def test_an_unknown_pause_mode_is_refused(engine):
    assert 400 <= engine.call("POST", "/pause_generation", {"mode": "sleep"}).status_code < 500


@pytest.mark.parametrize("transport", ["tensor", "gloo", "disk"])
def test_new_weights_are_what_is_generated_with(engine, transport):
    ids = engine.generate(PROMPT, max_new_tokens=8, temperature=0, ignore_eos=True)["output_ids"]
    sent = send(engine, 7, 0.5, transport=transport)
    assert sent.num_tensors == len(named_tensors(engine)) and sent.num_bytes > 0
    after = engine.generate(PROMPT, max_new_tokens=8, temperature=0, ignore_eos=True)
    assert after["meta_info"]["weight_version"] == "7"
    assert engine.call("GET", "/model_info").json()["weight_version"] == "7"
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(0.5)
    try:
        expected = engine.log_probs(PROMPT, after["output_ids"])
        torch.testing.assert_close(output_log_probs(after), expected, atol=2e-4, rtol=0)
        check_weights([engine.control], engine.kind, 7, iter(named_tensors(engine, 0.5)), 1 << 16)
    finally:
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(2.0)
        send(engine, 8, 1.0)
    restored = engine.generate(PROMPT, max_new_tokens=8, temperature=0, ignore_eos=True)
    assert restored["output_ids"] == ids  # of which the cache had the prompt under other weights


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_says_which_weights_drew_which_token(engine, mode):
    request = engine.long("across an update")
    old = engine.call("GET", "/model_info").json()["weight_version"]
    send(engine, 20, 1.0, mode)
    before = engine.num_generated
    while engine.num_generated < before + 3:
        time.sleep(0.05)
    engine.post("/abort_request", {"rid": "across an update"})
    answer = request.result
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [old, "20"]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == len(answer["output_ids"])
    send(engine, int(old) if old.isdigit() else 0, 1.0)


def test_tensors_outside_an_update_are_refused(engine):
    from colloid.weights.sglang_tensor import SharedStorage

    bucket = next(make_buckets(iter(named_tensors(engine)), 1 << 20))
    memory = SharedStorage()
    memory.fill(bucket)
    body = {"serialized_named_tensors": [memory.serialized(bucket)], "load_format": "flattened_bucket"}
    assert engine.call("POST", "/update_weights_from_tensor", body).status_code == 400
    assert engine.call("POST", "/end_weight_update", {}).status_code == 400


def test_a_difference_in_weights_is_found(engine):
    from colloid.errors import WeightSyncError

    tensors = named_tensors(engine)
    send(engine, 30, 1.0)
    check_weights([engine.control], engine.kind, 30, iter(tensors), 1 << 16)
    changed = [(name, tensor.clone()) for name, tensor in tensors]
    changed[3][1].view(-1)[5] += 1e-3
    with pytest.raises(WeightSyncError, match=changed[3][0].split(".")[-2][:1]):
        check_weights([engine.control], engine.kind, 30, iter(changed), 1 << 16)
    with pytest.raises(WeightSyncError):
        check_weights([engine.control], engine.kind, 30, iter(tensors[:-1]), 1 << 16)
    send(engine, 31, 1.0)
    check_weights([engine.control], engine.kind, 31, iter(tensors), 1 << 16)


def test_memory_is_released_and_resumed_by_tag_with_an_update_between(engine):
    ids = engine.generate(PROMPT, max_new_tokens=8, temperature=0, ignore_eos=True)["output_ids"]
    engine.long("nobody waits for it")
    memory, url = EngineMemory(KEY), engine.url
    memory.release([url], TAGS)
    memory.release([url], TAGS)
    memory.resume([url], [WEIGHTS])
    send(engine, 40, 1.0)
    memory.resume([url], [KV_CACHE])
    memory.resume([url], TAGS)
    assert not memory.is_released
    again = engine.generate(PROMPT, max_new_tokens=8, temperature=0, ignore_eos=True)
    assert again["output_ids"] == ids and again["meta_info"]["cached_tokens"] == 0
