"""Requests that no client should send, drawn from a seed: wrong bodies, paths, keys, and what is no HTTP at all."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

JUNK: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        -0.0,
        2**31,
        2**63,
        2**64,
        -(2**63) - 1,
        10**40,
        1e308,
        "",
        "text",
        "\0",
        "é\ud83d",
    ),
    *([], {}, [None], [[]], [{}], [1, "a"], [[1], 2], {"a": {"b": [1]}}, ["x" * 300], [1e99], "../../etc/passwd"),
)
VOCABULARY = 512
GENERATE: dict[str, Any] = {
    "input_ids": [5, 6, 7],
    "rid": "fuzz",
    "stream": False,
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 1,
    "token_ids_logprob": [4],
    "sampling_params": {
        "max_new_tokens": 1,
        "min_new_tokens": 0,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "stop": ["x"],
        "stop_token_ids": [3],
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 1.0},
        "sampling_seed": 3,
        "n": 1,
        "stream_interval": 1,
        "ignore_eos": True,
    },
}
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 1,
    "temperature": 0.0,
    "logprobs": True,
    "top_logprobs": 1,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {},
}
COMPLETION = {"model": "m", "prompt": "a", "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 5}
MEMORY = {"path": "/dev/shm/colloid-weights-none", "size": 64, "begin": 0, "reader": 0}
TENSOR = {"name": "model.norm.weight", "dtype": "float32", "shape": [4], "offset": 0}
UPDATES: dict[str, dict[str, Any]] = {
    "/begin_weight_update": {"weight_version": "9"},
    "/end_weight_update": {"weight_version": "9", "num_tensors": 3},
    "/update_weights_from_tensor": {
        "weight_version": "9",
        "shared_memory": MEMORY,
        "tensors": [TENSOR],
    },
    "/update_weights_from_disk": {"model_path": "/nowhere", "load_format": "auto", "weight_version": "9"},
    "/update_weights_from_distributed": {
        "weight_version": "9",
        "names": ["model.norm.weight"],
        "dtypes": ["float32"],
        "shapes": [[4]],
        "group_name": "none",
        "checksum": "",
    },
    "/init_weights_update_group": {
        "master_address": "127.0.0.1",
        "master_port": 0,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "none",
        "backend": "gloo",
    },
    "/destroy_weights_update_group": {"group_name": "none"},
    "/weights_checker": {"action": "snapshot"},
}
CONTROLS: dict[str, dict[str, Any]] = {"/abort_request": {"rid": "nobody", "abort_all": False}}
PATHS = ("/", "/generat", "/v1", "/v1/embeddings", "/generate/", "//generate", "/v1/models/none", "/%00", "/a" * 500)


@dataclass(frozen=True)
class Bad:
    """A request; `key`: what is sent as the bearer token, None for the right one."""

    method: str
    path: str
    body: bytes | None
    key: str | None = None


def _damaged(value: Any, rng: random.Random) -> Any:
    """A copy with one place changed: junk in it, gone, misspelt, or nested one deeper."""
    if isinstance(value, dict) and value:
        name = rng.choice(list(value))
        rest = {key: each for key, each in value.items() if key != name}
        way = rng.random()
        if way < 0.5:
            return rest | {name: _damaged(value[name], rng)}
        if way < 0.6:
            return rest
        return rest | ({name + "_": value[name]} if way < 0.7 else {name: rng.choice(JUNK)})
    if isinstance(value, list) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return [*value[:at], _damaged(value[at], rng), *value[at + 1 :]]
    if isinstance(value, list) and rng.random() < 0.3:
        return [rng.choice((-1, VOCABULARY, 2**40, 10**30, True, "1"))] * rng.choice((1, 5000))
    return rng.choice(JUNK)


def _encoded(body: Any, rng: random.Random) -> bytes:
    text = json.dumps(body)
    way = rng.random()
    if way < 0.03:
        return text[: rng.randrange(len(text))].encode()
    if way < 0.05:
        return text.encode() + rng.choice((b"}", b"\xff\xfe", b"\0", b" x"))
    if way < 0.06:
        return text.replace(":", ": NaN,", 1).encode()
    if way < 0.07:
        return rng.choice(
            (b"[" * 5000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b'"\xc3\x28"', b"\xff" * 50, b"null", b"5")
        )
    return text.encode()


def draw(rng: random.Random) -> Bad:
    """A request that is almost always wrong; a right one makes few tokens."""
    way = rng.random()
    if way < 0.03:
        return Bad(rng.choice(("GET", "POST", "PUT", "HEAD", "DELETE")), rng.choice(PATHS), b"{}")
    if way < 0.06:
        return Bad(rng.choice(("PUT", "DELETE", "PATCH", "GET")), "/generate", json.dumps(GENERATE).encode())
    if way < 0.09:
        return Bad("POST", "/generate", json.dumps(GENERATE).encode(), rng.choice(("", "wrong", "k" * 5000, "\u00e9")))
    if way < 0.55:
        path, base = "/generate", GENERATE
    elif way < 0.70:
        path, base = "/v1/chat/completions", CHAT
    elif way < 0.80:
        path, base = "/v1/completions", COMPLETION
    else:
        path, base = rng.choice([*UPDATES.items(), *CONTROLS.items()])
    body = _damaged(base, rng)
    if isinstance(body, dict):
        body = _short(body)
    return Bad("POST", path, _encoded(body, rng))


def _short(body: dict[str, Any]) -> dict[str, Any]:
    """Without what would be a right request for very many tokens, for a pause, or for the end of others' requests."""
    params = body.get("sampling_params")
    if isinstance(params, dict) and params.get("max_new_tokens", None) is None:
        body = body | {"sampling_params": params | {"max_new_tokens": 2}}
    if params is None and "input_ids" in body:
        body = body | {"sampling_params": {"max_new_tokens": 2, "top_p": 0}}
    if "messages" in body or "prompt" in body:
        body = body if isinstance(body.get("max_tokens"), int) else body | {"max_tokens": "2"}
    return body | {"abort_all": 1} if body.get("abort_all") is True else body


def raw_requests(host: str) -> list[bytes]:
    """What is not HTTP, or not all of it; each is sent over a connection of its own."""
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\n".encode()
    return [
        b"\0" * 2000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 200,  # a TLS hello
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /generate\r\n\r\n",
        head + b"Content-Length: -5\r\n\r\n{}",
        head + b"Content-Length: many\r\n\r\n{}",
        head + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        head + b"Content-Length: 100\r\n\r\n{",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        head + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope",
        head + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        head + b"No colon here\r\n\r\n",
        head + b"".join(b"X-%d: 1\r\n" % n for n in range(2000)) + b"\r\n",
        head,
    ]
