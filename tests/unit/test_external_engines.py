"""Engines that run already: how they are named, what is asked of them, and what is refused before anything starts."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from colloid.config import derive, parse
from colloid.config.external import external_addresses
from colloid.engines.external import SETTLED_SECONDS, AddressFile, Expected, check_engines, find_engine
from colloid.errors import ConfigError, EngineError

KEY = "the key"
EMBEDDED = {"engine": "embedded", "enable_deterministic_inference": False, "weights_dirs": ["/shared/weights"]}
SGLANG = {"tp_size": 2, "enable_deterministic_inference": False}
MODEL = {"model_path": "/m", "model_type": "qwen3", "vocab_size": 128, "architectures": ["Qwen3ForCausalLM"]}
EXPECTED = Expected("qwen3", 128, ("Qwen3ForCausalLM",), transport="gloo")


class Facts(BaseHTTPRequestHandler):
    """Answers as an engine whose facts are those of its server."""

    def do_GET(self) -> None:
        authorised = self.headers.get("Authorization") == f"Bearer {KEY}"
        body = json.dumps(self.server.facts.get(self.path, {})).encode()
        self.send_response(200 if authorised else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def engine():
    """`engine(server, model)` -> address of one that says so."""
    servers = []

    def start(server: dict, model: dict = MODEL) -> str:
        http = ThreadingHTTPServer(("127.0.0.1", 0), Facts)
        http.facts = {"/server_info": server, "/model_info": model}
        threading.Thread(target=http.serve_forever, daemon=True).start()
        servers.append(http)
        return f"http://127.0.0.1:{http.server_address[1]}"

    yield start
    for http in servers:
        http.shutdown()
        http.server_close()


def test_addresses_are_read_from_the_option_and_from_a_file(tmp_path):
    assert external_addresses(["host:1", "http://10.0.0.7:30000/", "[::1]:5"]) == (
        *("http://host:1", "http://10.0.0.7:30000"),
        "http://[::1]:5",
    )
    listed = tmp_path / "engines.txt"
    listed.write_text("# two\n host:1\n\nhost:2  # the second\n")
    assert external_addresses([f"@{listed}"]) == ("http://host:1", "http://host:2")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["host"], "'host' is no address: give host:port"),
        (["host:99999"], "no address"),
        (["https://host:1"], "no address"),
        (["host:1", "http://host:1"], "http://host:1 is there more than once"),
        (["@/nowhere/engines.txt"], "cannot be read"),
        (["@a", "host:1"], "a file, @a, stands alone"),
    ],
)
def test_what_is_no_list_of_engines_is_said_to_be_none(values, words):
    with pytest.raises(ConfigError, match=words):
        external_addresses(values)


def plan(*argv):
    return parse(["--dry-run", "--num-layers", "2", "--rollout-external-engine-addrs", *argv])


@pytest.mark.parametrize("engine", [[], ["--rollout-engine", "sglang"]])
def test_with_cuda_the_engines_may_be_elsewhere_and_no_sglang_is_needed_here(monkeypatch, engine):
    monkeypatch.setattr(derive, "num_cuda_devices", lambda: 8)
    args = plan("10.0.0.7:30000", *engine)
    assert (args.device, args.update_weight_transport) == ("cuda", "nccl")


def test_a_run_with_engines_of_somebody_elses_starts_none_and_reaches_them_anywhere():
    args = plan("10.0.0.7:1", "10.0.0.8:1", "10.0.0.9:1")
    assert (args.num_engines, args.rollout_num_gpus, args.update_weight_transport) == (3, 0, "gloo")
    assert plan("10.0.0.7:1", "--update-weight-mode", "delta").update_weight_transport == "disk"
    assert plan("127.0.0.1:1", "--update-weight-transport", "tensor").update_weight_transport == "tensor"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rollout-num-gpus", "2"], "--rollout-num-gpus: the engines of .* run already"),
        (["--colocate"], "--colocate: the engines"),
        (["--sglang-mem-fraction-static", "0.5"], "--sglang-mem-fraction-static: the engines"),
        (["--update-weight-transport", "tensor"], "shared memory does not reach http://10.0.0.7:1. Take gloo"),
    ],
)
def test_options_that_say_how_engines_are_started_or_reach_none_elsewhere_are_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        plan("10.0.0.7:1", *argv)


def test_an_engine_is_known_by_what_it_says(engine):
    assert find_engine(engine(EMBEDDED), KEY, EXPECTED).kind == "embedded"
    assert find_engine(engine(SGLANG), KEY, EXPECTED).kind == "sglang"
    assert check_engines([engine(EMBEDDED), engine(EMBEDDED)], KEY, EXPECTED) == "embedded"


@pytest.mark.parametrize(
    ("server", "model", "expected", "words"),
    [
        (EMBEDDED, {**MODEL, "model_type": "llama"}, {}, "model of type 'llama', --hf-checkpoint 'qwen3'"),
        (EMBEDDED, {**MODEL, "vocab_size": 7}, {}, "vocabulary of 7, --hf-checkpoint 128"),
        (SGLANG, {**MODEL, "architectures": ["Other"]}, {}, "architecture .'Other',."),
        (SGLANG, MODEL, {"kind": "embedded"}, "it is of kind sglang, the others are embedded"),
        (SGLANG, MODEL, {"transport": "tensor"}, "pickles, which go only to servers that the run has started"),
        (EMBEDDED, MODEL, {"transport": "nccl"}, "computes on the CPU: take --update-weight-transport gloo"),
        (EMBEDDED, MODEL, {"deterministic": True}, "started with --enable-deterministic-inference"),
        (
            *(EMBEDDED, MODEL, {"transport": "disk", "disk_dirs": ("/shared/weights/a", "/elsewhere")}),
            "may not read weights from /elsewhere: start it with --weights-dir /elsewhere",
        ),
        (EMBEDDED, {"detail": "what?"}, {}, "is no engine with SGLang's API"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_with_the_reason(engine, server, model, expected, words):
    fields = {**EXPECTED.__dict__, **expected}
    with pytest.raises(ConfigError, match=words):
        find_engine(engine(server, model), KEY, Expected(**fields))


def test_all_that_is_wrong_is_said_at_once(engine):
    closed = "http://127.0.0.1:9"
    with pytest.raises(EngineError):
        find_engine(closed, KEY, EXPECTED)
    with pytest.raises(ConfigError) as caught:
        check_engines([closed, engine(EMBEDDED, {**MODEL, "vocab_size": 7})], KEY, EXPECTED)
    assert "127.0.0.1:9 cannot be reached" in str(caught.value) and "vocabulary of 7" in str(caught.value)
    with pytest.raises(ConfigError, match="asks for another API key: set COLLOID_API_KEY"):
        check_engines([engine(EMBEDDED)], "another", EXPECTED)
    with pytest.raises(ConfigError, match="engines of one kind only.*embedded: .*sglang: "):
        check_engines([engine(EMBEDDED), engine(SGLANG)], KEY, EXPECTED)


def test_a_list_is_read_again_once_it_has_settled_and_a_wrong_one_is_said_once(tmp_path):
    listed, now = tmp_path / "engines.txt", [time.time()]
    listed.write_text("host:1\n")
    file = AddressFile(listed, lambda: external_addresses([f"@{listed}"]), lambda: now[0])
    assert file.changed() is None, "more may follow"
    now[0] += 10
    assert file.changed() == ("http://host:1",), "it may be another one than was read before the start"
    assert file.changed() is None, "as it was"
    listed.write_text("host:1\nhost:2\n")
    now[0] = listed.stat().st_mtime + SETTLED_SECONDS / 2
    assert file.changed() is None, "more may follow"
    now[0] += SETTLED_SECONDS
    assert file.changed() == ("http://host:1", "http://host:2")
    assert file.changed() is None
    listed.write_text("")
    now[0] = listed.stat().st_mtime + SETTLED_SECONDS * 2
    with pytest.raises(ConfigError, match="names no engine"):
        file.changed()
    assert file.changed() is None
    listed.unlink()
    assert file.changed() is None
