"""The HTTP contract, against a real server process."""

import json
import threading
import time

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.models import prompt_of

pytestmark = pytest.mark.timeout(60)
PROMPT = prompt_of(20, 400, 1)
LONG = {"max_new_tokens": 3000, "ignore_eos": True}


class Background(threading.Thread):
    """A request under way; `result` is its answer."""

    def __init__(self, server, **body):
        super().__init__(daemon=True)
        self.server, self.body = server, body
        self.start()

    def run(self):
        self.answer = self.server.post("/generate", self.body, timeout=60)

    @property
    def result(self):
        self.join(30)
        assert not self.is_alive(), "the request was not answered within 30 s"
        return self.answer


def idle(load) -> bool:
    return load["num_running_reqs"] == load["num_queued_reqs"] == 0


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(server):
    yield
    server.post("/continue_generation")
    server.wait_until(idle, "the engine is idle")


def test_answer_has_the_fields_of_the_contract(server):
    answer = server.generate(PROMPT, max_new_tokens=6, ignore_eos=True, body={"rid": "mine"})
    meta = answer["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["prompt_tokens"] == 20 and meta["completion_tokens"] == 6 and meta["cached_tokens"] == 0
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[0] < 0 and entry[2] is None for entry in meta["output_token_logprobs"])
    version = meta["weight_version"]
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 6}]
    assert isinstance(answer["text"], str) and meta["e2e_latency"] > 0


def test_batches_and_n_samples_come_back_in_order(server):
    params = [{"max_new_tokens": 3, "ignore_eos": True}, {"max_new_tokens": 4, "ignore_eos": True, "n": 2}]
    answers = server.post("/generate", {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": params, "rid": ["x", "y"]})
    assert [a["meta_info"]["id"] for a in answers] == ["x", "y#0", "y#1"]
    assert [len(a["output_ids"]) for a in answers] == [3, 4, 4]
    assert "output_token_logprobs" not in answers[0]["meta_info"]


def test_text_prompts_stop_strings_and_their_trimming(server):
    whole = server.generate("What is 3 + 4?", max_new_tokens=40, temperature=0, ignore_eos=True)
    text = whole["text"]
    stop = text[10:13]
    params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": ["never there", stop]}
    answer = server.generate("What is 3 + 4?", **params)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == text[: text.index(stop)]
    assert answer["output_ids"] == whole["output_ids"][: len(answer["output_ids"])]
    untrimmed = server.generate("What is 3 + 4?", **params, no_stop_trim=True)
    assert untrimmed["text"].startswith(text[: text.index(stop) + len(stop)])


def test_stop_tokens_are_in_the_ids_and_not_in_the_text(server):
    whole = server.generate(PROMPT, max_new_tokens=20, temperature=0, ignore_eos=True)
    token = whole["output_ids"][7]
    at = whole["output_ids"].index(token)
    # Stop tokens count although end-of-sequence is what the model's config says it is.
    answer = server.generate(PROMPT, max_new_tokens=20, temperature=0, stop_token_ids=[token])
    if answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}:
        assert answer["output_ids"] == whole["output_ids"][: at + 1]
        shorter = server.generate(PROMPT, max_new_tokens=at or 1, temperature=0, ignore_eos=True)
        assert answer["text"] == (shorter["text"] if at else "")
    else:
        assert answer["output_ids"][-1] == answer["meta_info"]["finish_reason"]["matched"]


def test_zero_new_tokens_is_answered_at_once(server):
    answer = server.generate(PROMPT, max_new_tokens=0)
    assert answer["output_ids"] == [] and answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def events_of(response) -> list:
    lines = [line[6:] for line in response.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_ends_with_what_the_plain_answer_says(server):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 12, "sampling_seed": 4, "ignore_eos": True},
        "return_logprob": True,
    }
    plain = server.post("/generate", body)
    response = requests.post(
        server.url + "/generate", json={**body, "stream": True}, headers=server.headers, stream=True, timeout=30
    )
    events = events_of(response)
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert events[-1]["output_ids"] == plain["output_ids"] and events[-1]["text"] == plain["text"]
    assert events[-1]["meta_info"]["output_token_logprobs"] == plain["meta_info"]["output_token_logprobs"]
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths) and lengths[-1] == 12


def test_a_client_that_goes_away_takes_its_request_with_it(server):
    for stream in (False, True):
        body = {"input_ids": PROMPT, "sampling_params": LONG, "stream": stream}
        session = requests.Session()
        with pytest.raises(requests.exceptions.RequestException):
            response = session.post(
                server.url + "/generate", json=body, headers=server.headers, timeout=0.5, stream=stream
            )
            next(response.iter_content(16))
            response.close()
            session.close()
            raise requests.exceptions.RequestException("closed by the test")
        server.wait_until(idle, "the abandoned request is gone")


def test_abort_by_id_answers_with_the_tokens_so_far(server):
    request = Background(server, input_ids=PROMPT, sampling_params={**LONG, "n": 2}, rid="to abort")
    other = Background(server, input_ids=PROMPT, sampling_params={"max_new_tokens": 100, "ignore_eos": True})
    server.wait_until(lambda load: load["num_running_reqs"] >= 2, "both run")
    time.sleep(0.1)
    assert server.post("/abort_request", {"rid": "nobody's"})["num_aborted"] == 0
    assert server.post("/abort_request", {"rid": "to abort"})["num_aborted"] == 2
    for answer in request.result:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 3000
    assert len(other.result["output_ids"]) == 100


def test_abort_all_answers_what_waits_as_well(server):
    running = [Background(server, input_ids=PROMPT, sampling_params={**LONG, "n": 16}) for _ in range(2)]
    counts = ("num_running_reqs", "num_queued_reqs")
    server.wait_until(lambda load: all(load[n] for n in counts) and sum(load[n] for n in counts) == 32, "some wait")
    server.post("/abort_request", {"abort_all": True})
    reasons = [a["meta_info"]["finish_reason"]["type"] for request in running for a in request.result]
    assert reasons == ["abort"] * 32


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_holds_requests_and_they_go_on_where_they_were(server, mode):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True, "sampling_seed": 7}}
    expected = server.post("/generate", body)
    request = Background(server, **body)
    server.wait_until(lambda load: load["num_running_reqs"] == 1, "it runs")
    server.post("/pause_generation", {"mode": mode})
    tokens = server.load["generation_tokens_total"]
    late = Background(server, input_ids=[9, 9], sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    time.sleep(0.2)
    assert server.load["generation_tokens_total"] == tokens
    assert server.load["num_used_tokens"] > 0 or mode == "retract"
    assert server.get("/health_generate")["paused"]
    server.post("/continue_generation")
    assert len(late.result["output_ids"]) == 2
    answer = request.result
    assert len(answer["output_ids"]) == 400
    if mode == "in_place":
        assert answer["output_ids"] == expected["output_ids"]


def test_pause_with_abort_answers_everything(server):
    request = Background(server, input_ids=PROMPT, sampling_params=LONG)
    server.wait_until(lambda load: load["num_running_reqs"] == 1, "it runs")
    server.post("/pause_generation", {})
    assert request.result["meta_info"]["finish_reason"]["type"] == "abort"


def test_separate_requests_with_one_prompt_share_it(server):
    prompt = prompt_of(200, 400, 77)
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    server.post("/pause_generation", {"mode": "in_place"})
    before = server.load["prompt_tokens_total"]
    requests_ = [Background(server, **body) for _ in range(8)]
    server.wait_until(lambda load: load["num_queued_reqs"] == 8, "all wait")
    server.post("/continue_generation")
    cached = sorted(request.result["meta_info"]["cached_tokens"] for request in requests_)
    assert cached == [0] + [200] * 7
    assert server.load["prompt_tokens_total"] - before == 200


def test_facts_about_the_server_by_current_and_older_names(server):
    info = server.get("/server_info")
    assert info == server.get("/get_server_info")
    assert info["model_path"] == str(server.model_path) and info["dtype"] == "float32"
    assert info["max_total_num_tokens"] == 16384 and info["context_length"] == 4096
    assert server.get("/model_info") == server.get("/get_model_info")
    assert server.get("/model_info")["model_path"] == str(server.model_path)
    assert server.get("/v1/models")["data"][0]["id"] == "tiny"
    assert server.get("/health_generate")["status"] == "ok"
    metrics = requests.get(server.url + "/metrics", headers=server.headers, timeout=10).text
    assert 'sglang:generation_tokens_total{model_name="tiny"} ' in metrics


def test_the_key_is_demanded_everywhere_but_on_health(server):
    assert requests.get(server.url + "/health", timeout=10).status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer ké"}):
        raw = {name: value.encode() for name, value in headers.items()}
        assert requests.get(server.url + "/server_info", headers=raw, timeout=10).status_code == 401
        assert requests.post(server.url + "/generate", json={}, headers=raw, timeout=10).status_code == 401


def test_chat_and_completions(server):
    body = {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "max_tokens": 5, "temperature": 0, "n": 2}
    answer = server.post("/v1/chat/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["message"]["role"] == "assistant" and answer["usage"]["completion_tokens"] <= 10
    prefill = [*body["messages"], {"role": "assistant", "content": "The answer is"}]
    assert server.post("/v1/chat/completions", {**body, "messages": prefill})["usage"]["prompt_tokens"] > 5
    body = {"prompt": "What is", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/completions", body)["choices"][0]["text"]
    response = requests.post(
        server.url + "/v1/completions", json={**body, "stream": True}, headers=server.headers, stream=True, timeout=30
    )
    assert "".join(event["choices"][0]["text"] for event in events_of(response)) == whole


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", b"{", "not valid JSON"),
        ("/generate", b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}', "not valid JSON"),
        ("/generate", [], "must be a JSON object"),
        ("/generate", {}, "either text or input_ids"),
        ("/generate", {"input_ids": [1], "text": "a"}, "either text or input_ids"),
        ("/generate", {"input_ids": []}, "must not be empty"),
        ("/generate", {"input_ids": [[1], []]}, "must not be empty"),
        ("/generate", {"input_ids": [512]}, "vocabulary has 512"),
        ("/generate", {"input_ids": [-1]}, "vocabulary has 512"),
        ("/generate", {"input_ids": [1.5]}, "list of integers"),
        ("/generate", {"input_ids": [True]}, "list of integers"),
        ("/generate", {"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ("/generate", {"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ("/generate", {"input_ids": [1], "sampling_params": {"tempreature": 1}}, "tempreature"),
        ("/generate", {"input_ids": [1], "sampling_params": {"frequency_penalty": 3}}, "frequency_penalty"),
        ("/generate", {"input_ids": [1], "sampling_params": {"repetition_penalty": 0}}, "repetition_penalty"),
        ("/generate", {"input_ids": [1], "sampling_params": {"logit_bias": {"x": 1}}}, "token ids"),
        ("/generate", {"input_ids": [1], "sampling_params": {"logit_bias": {"512": 1}}}, "vocabulary has 512"),
        ("/generate", {"input_ids": [1], "sampling_params": {"regex": "a+"}}, "regex = 'a+' is not supported"),
        ("/generate", {"input_ids": [1], "sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ("/generate", {"input_ids": [1], "sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ("/generate", {"input_ids": [1], "sampling_params": {"beam_width": 2}}, "beam_width"),
        ("/generate", {"input_ids": [1], "priority": 1}, "priority = 1 is not supported"),
        ("/generate", {"input_ids": [1], "sampling_parms": {}}, "'sampling_parms'; known are"),
        ("/generate", {"input_ids": [[1]] * 17, "sampling_params": {"n": 4096}}, "at most 65536"),
        ("/generate", {"text": "a" * 300_000}, "never holds more"),
        ("/generate", {"input_ids": [1], "logprob_start_len": -2}, "logprob_start_len"),
        ("/generate", {"input_ids": [1], "top_logprobs_num": 2000}, "from 0 to 1024"),
        ("/generate", {"input_ids": [1], "token_ids_logprob": [512]}, "vocabulary has 512"),
        ("/generate", {"input_ids": [1], "token_ids_logprob": [[1], [2]]}, "list of 2"),
        ("/generate", {"input_ids": [1], "sampling_params": [{}]}, "list of 1"),
        ("/generate", {"input_ids": [[1], [2]], "rid": ["a", "a"]}, "differ"),
        ("/generate", {"input_ids": [1] * 5000}, "longer than the model's context length"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 5000}}, "maximum context length"),
        ("/pause_generation", {"mode": "later"}, "in_place"),
        ("/abort_request", {}, "rid"),
        ("/weights_checker", {"action": "snapshot"}, "checksum"),
        ("/v1/completions", {"prompt": 5}, "prompt"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [1]}, "tools"),
    ],
)
def test_malformed_requests_are_answered_with_400_and_say_why(server, path, body, message):
    answer = server.post(path, body, data=body if isinstance(body, bytes) else None, status=400)
    assert message in answer["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["text", "input_ids", "sampling_params", "rid", "return_logprob", "stream", "logprob_start_len", "image_data"]
PARAMS = ["max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "n", "sampling_seed"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    st.dictionaries(st.sampled_from(PARAMS), JSON, max_size=3),
)
def test_whatever_the_body_is_the_server_answers_200_or_400(server, body, params):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, **params}, **body}
    answer = requests.post(server.url + "/generate", data=json.dumps(body).encode(), headers=server.headers, timeout=20)
    assert answer.status_code in (200, 400), answer.text[:300]
