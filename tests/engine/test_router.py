"""The real routers in front of a small HTTP server that answers as an engine does."""

import asyncio
import importlib.util
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from colloid.engines.addresses import address_for, address_towards, free_port
from colloid.engines.contract_generate import KNOWN_FIELDS, UNSUPPORTED_PARAMETERS
from colloid.engines.control import EngineControl
from colloid.engines.launch import WorkerRole
from colloid.engines.router import ExternalRouter, Router, RouterConfig
from colloid.errors import ConfigError, EngineError
from colloid.rollout.client import EngineClient
from colloid.rollout.direct import PARAMETERS_PASSED_ON, PASSED_ON, not_passed_on

KEY = "a-key"


class FakeEngine(BaseHTTPRequestHandler):
    """Answers with the request's body; asks for the key, as engines do."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        authorised = self.headers.get("Authorization") == f"Bearer {KEY}" or self.path == "/health"
        data = {
            "model_path": "/nowhere",
            "served_model_name": "m",
            "meta_info": {},
            "got": json.loads(body) if body else None,
        }
        data["port"] = self.server.server_address[1]
        if self.path == "/generate":
            vars(self.server).setdefault("generated", []).append(data["got"])
        answer = json.dumps(data).encode()
        self.send_response(200 if authorised else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = _answer

    def log_message(self, *arguments) -> None:
        pass


WITHOUT_SMG = pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="needs smg: pip install smg")


@pytest.fixture(scope="module")
def engine_url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.fixture(scope="module", params=["sglang-router", pytest.param("smg", marks=WITHOUT_SMG)])
def router(request, engine_url, tmp_path_factory):
    router = Router(RouterConfig(kind=request.param), KEY, tmp_path_factory.mktemp("router"))
    router.register(engine_url)
    yield router
    router.stop()


def test_a_request_reaches_the_engine_with_all_that_colloid_sends(router):
    request = {"input_ids": [1, 2], "rid": "r", "return_logprob": True, "sampling_params": {"sampling_seed": 7}}
    got = EngineControl(router.url, KEY).post("/generate", request)["got"]
    assert {key: got[key] for key in request} == request


SAMPLING = {
    **dict.fromkeys(("ebnf", "json_schema", "regex", "stop"), "text"),
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "n", "sampling_seed", "top_k"), 3),
    **dict.fromkeys(("frequency_penalty", "min_p", "presence_penalty", "repetition_penalty"), 0.5),
    **dict.fromkeys(("temperature", "top_p"), 0.5),
    **dict.fromkeys(("ignore_eos", "no_stop_trim", "skip_special_tokens"), True),
    "stop_token_ids": [3, 4],
}
FIELDS = {
    **dict.fromkeys(("bootstrap_host", "bootstrap_pair_key", "conversation_id", "custom_logit_processor"), "text"),
    **dict.fromkeys(("extra_key", "lora_id", "lora_path", "text"), "text"),
    **dict.fromkeys(("bootstrap_port", "bootstrap_room", "data_parallel_rank", "logprob_start_len"), 3),
    **dict.fromkeys(("priority", "top_logprobs_num"), 3),
    **dict.fromkeys(("background", "log_metrics", "no_logs", "return_bytes", "return_entropy"), True),
    **dict.fromkeys(("return_hidden_states", "return_logprob", "return_text_in_logprobs"), True),
    **dict.fromkeys(("audio_data", "image_data", "video_data", "modalities"), ["text"]),
    **dict.fromkeys(("input_ids", "token_ids_logprob"), [3, 4]),
    "input_embeds": [[0.5]],
    "session_params": {"id": "s"},
    "sampling_params": SAMPLING,
}


def test_a_router_passes_on_what_is_sent_through_it(router):
    """All else goes to an engine directly, as it would be lost on its way."""
    # `model`: smg looks for one of that name; `stream`: another kind of answer, see the contract; `rid`: above.
    assert set(FIELDS) == PASSED_ON - {"model", "stream", "rid"} and set(SAMPLING) == PARAMETERS_PASSED_ON
    got = EngineControl(router.url, KEY).post("/generate", FIELDS)["got"]
    assert {name: value for name, value in FIELDS.items() if got.get(name) != value} == {}
    assert not_passed_on(FIELDS) == []


def test_all_that_sglang_takes_reaches_an_engine_through_the_router_or_directly(router, engine_url):
    """Of the fields and parameters that either engine knows, and of some that none does."""
    asked = [{name: FIELDS.get(name, [3])} for name in (KNOWN_FIELDS - {"model", "stream", "rid"}) | {"new_field"}]
    asked += [
        {"sampling_params": {name: SAMPLING.get(name, [3])}}
        for name in UNSUPPORTED_PARAMETERS.keys() | set(SAMPLING) | {"logit_bias", "stream_interval", "new_parameter"}
    ]

    async def send() -> list[dict]:
        client = EngineClient(router.url, [engine_url], api_key=KEY)
        try:
            answers = await asyncio.gather(*(client.generate({"input_ids": [1], **each}) for each in asked))
        finally:
            await client.close()
        return [answer["got"] for answer in answers]

    got = asyncio.run(send())
    assert [each for each, arrived in zip(asked, got, strict=True) if not each.items() <= arrived.items()] == []


def test_a_client_without_the_key_is_refused(router):
    with pytest.raises(EngineError, match="401"):
        EngineControl(router.url).post("/generate", {"input_ids": [1]})


def test_a_port_in_use_is_an_error_that_names_it(router, tmp_path):
    port = int(router.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=str(port)):
        Router(RouterConfig(port=port), KEY, tmp_path)


def test_engines_register_at_a_router_that_runs_already_and_leave_it_at_the_end(router, engine_url):
    other = ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{other.server_address[1]}"

    def registered() -> set[str]:
        return {worker["url"].rstrip("/") for worker in EngineControl(router.url, KEY).get("/workers")["workers"]}

    external = ExternalRouter(router.url, KEY)
    external.register(url)
    assert registered() == {url, engine_url}
    external.stop()
    assert registered() == {engine_url}
    other.shutdown()


@pytest.mark.parametrize(
    ("kind", "policy"), [("sglang-router", "manual"), pytest.param("smg", "consistent_hashing", marks=WITHOUT_SMG)]
)
def test_the_turns_of_a_conversation_go_to_one_engine(kind, policy, tmp_path):
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine) for _ in range(2)]
    router = Router(RouterConfig(kind=kind, options={"policy": policy}), KEY, tmp_path)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        router.register(f"http://127.0.0.1:{server.server_address[1]}")

    async def talk() -> dict[str, set[int]]:
        client = EngineClient(router.url, [], api_key=KEY)
        places: dict[str, set[int]] = {}
        for _turn in range(3):
            for session in map("sample-{}".format, range(24)):
                answer = await client.generate({"input_ids": [1]}, session=session)
                places.setdefault(session, set()).add(answer["port"])
        await client.close()
        return places

    places = asyncio.run(talk())
    router.stop()
    for server in servers:
        server.shutdown()
    assert all(len(ports) == 1 for ports in places.values()), places
    assert len(set.union(*places.values())) == 2


def test_a_router_that_is_not_there_is_an_error():
    with pytest.raises(EngineError, match="liveness"):
        ExternalRouter(f"http://127.0.0.1:{free_port()}", KEY)


def test_engines_listen_on_loopback_unless_the_router_is_elsewhere():
    here = ("localhost", "127.0.0.1", "127.0.0.2")
    assert {address_towards(host) for host in here} == {"127.0.0.1"}
    assert address_for(f"http://{host}:80" for host in here) == address_for([]) == "127.0.0.1"


def test_free_ports_can_be_bound():
    server = ThreadingHTTPServer(("127.0.0.1", free_port()), FakeEngine)
    server.server_close()


@pytest.mark.parametrize("kind", ["sglang-router", pytest.param("smg", marks=WITHOUT_SMG)])
def test_an_engine_that_prefills_and_one_that_decodes_get_the_same_request_and_know_where_to_meet(kind, tmp_path):
    router = Router(RouterConfig(kind=kind, options={"pd_disaggregation": True}), KEY, tmp_path)
    servers = {}
    try:
        for role in (WorkerRole("prefill", 8998), WorkerRole("decode")):
            servers[role.kind] = server = ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            router.register(f"http://127.0.0.1:{server.server_address[1]}", role)
        request = {"input_ids": [1, 2], "rid": "r", "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
        answer = EngineControl(router.url, KEY).post("/generate", request)
    finally:
        router.stop()
        for server in servers.values():
            server.shutdown()
    assert answer["port"] == servers["decode"].server_address[1]
    (prefill,), (decode,) = (server.generated for server in servers.values())
    assert prefill == decode
    assert {key: decode[key] for key in request} == request
    assert (decode["bootstrap_host"], decode["bootstrap_port"]) == ("127.0.0.1", 8998)
