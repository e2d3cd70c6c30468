"""The HTTP face of the embedded engine: SGLang's routes, answered from one event loop.

Bodies are parsed into the records of `colloid.engines.contract` and everything malformed is answered with 400. The
engine itself lives in the compute thread: handlers hand it functions and await what they return. A client that goes
away takes its samples with it.
"""

import asyncio
import base64
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from colloid.engines.contract import BadRequest, GenerateInput, GenerateRequest
from colloid.engines.embedded.memory import Occupation
from colloid.engines.embedded.request import FinishReason, Sequence
from colloid.engines.embedded.text import Text
from colloid.engines.embedded.update import WeightUpdates
from colloid.engines.embedded.weights import WeightStore
from colloid.engines.embedded.worker import Worker

MAX_BODY_BYTES = 256 << 20
HEALTH_GENERATE_SECONDS = 20


@dataclass(frozen=True)
class ServerInfo:
    """What does not change while the server lives, as /server_info and /model_info tell it."""

    model_path: str
    served_model_name: str
    model_type: str
    dtype: str
    context_length: int
    max_total_num_tokens: int
    max_running_requests: int
    vocab_size: int
    deterministic: bool
    weights_dirs: tuple[Path, ...] = ()
    """Where weights may be read from while the server lives."""


@dataclass(frozen=True)
class Snapshot:
    """A sample's output so far, taken in the compute thread."""

    length: int
    finish_reason: FinishReason | None


class Generation:
    """One request's samples between the two threads: `updates(i)` yields what becomes of sample i."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.sequences: list[Sequence] = []
        self.started = time.time()
        self._queues: dict[Sequence, asyncio.Queue[Snapshot]] = {}

    def prepare(self, prompt: GenerateInput, prompt_ids: tuple[int, ...], stream: bool) -> None:
        for sequence in self.worker.engine.make_sequences(prompt, prompt_ids, self._on_update, stream):
            self.sequences.append(sequence)
            self._queues[sequence] = asyncio.Queue()

    async def submit(self) -> None:
        await self.worker.call(self.worker.engine.add, self.sequences)

    async def updates(self, index: int) -> AsyncIterator[Snapshot]:
        """Ends with the snapshot that has a finish reason."""
        source = self._queues[self.sequences[index]]
        while True:
            snapshot = await source.get()
            while not source.empty():
                snapshot = source.get_nowait()
            yield snapshot
            if snapshot.finish_reason:
                return

    async def finished(self) -> None:
        for index in range(len(self.sequences)):
            async for _ in self.updates(index):
                pass

    def cancel(self) -> None:
        """The client is gone: its samples end after the step that they are in."""
        message = "the client closed the connection"
        task = asyncio.ensure_future(self.worker.call(self.worker.engine.end_all, self.sequences, message))
        task.add_done_callback(lambda done: done.exception())

    def _on_update(self, sequence: Sequence) -> None:
        snapshot = Snapshot(len(sequence.output_ids), sequence.finish_reason)
        self.worker.post(self._queues[sequence].put_nowait, snapshot)


class EngineServer:
    """Routes over one worker. Which endpoint does what is in the table of `routes`."""

    def __init__(self, worker: Worker, text: Text, store: WeightStore, info: ServerInfo, api_key: str | None = None):
        self.worker, self.text, self.store, self.info = worker, text, store, info
        self.updates = WeightUpdates(worker.engine, store, info.weights_dirs)
        self.memory = Occupation(worker.engine, self.updates)
        self._authorization = f"Bearer {api_key}".encode() if api_key else None
        self._generations: set[Generation] = set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/generate", self.generate)
        return app

    # ---- generation, for all endpoints that generate

    async def start(self, prompts: list[GenerateInput], stream: bool) -> Generation:
        """Tokenises, checks and queues the prompts of a request. Raises BadRequest."""
        if reason := self.memory.why_not_ready():
            raise web.HTTPServiceUnavailable(text=reason)
        if self.updates.is_broken:
            raise web.HTTPServiceUnavailable(text="the last weight update was not completed: send a complete one")
        if any(prompt.text is not None or prompt.params.stop for prompt in prompts) or self.text.available:
            await asyncio.to_thread(lambda: self.text.tokenizer)
        generation = Generation(self.worker)
        for prompt in prompts:
            ids = self.text.encode(prompt.text) if prompt.input_ids is None else prompt.input_ids
            generation.prepare(replace(prompt, rid=prompt.rid or uuid.uuid4().hex), ids, stream)
        await generation.submit()
        return generation

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = GenerateRequest.from_json(await read_json(request))
        generation = await self.start(list(body.inputs), body.stream)
        logprobs = [p.return_logprob for p in body.inputs for _ in range(p.params.n)]
        is_list = body.is_batch or len(generation.sequences) > 1
        try:
            if body.stream:
                return await self._stream(request, generation, logprobs, is_list)
            await generation.finished()
        except BaseException:
            generation.cancel()
            raise
        answers = [
            self._answer(generation, i, len(sequence.output_ids), sequence.finish_reason, logprobs[i])
            for i, sequence in enumerate(generation.sequences)
        ]
        return json_response(answers if is_list else answers[0])

    async def _stream(
        self, request: web.Request, generation: Generation, logprobs: list[bool], is_list: bool
    ) -> web.StreamResponse:
        """Server-sent events, each with all that came so far; those of several samples carry their `index`."""

        def event(index: int, snapshot: Snapshot) -> dict[str, Any]:
            answer = self._answer(generation, index, snapshot.length, snapshot.finish_reason, logprobs[index])
            return {**answer, "index": index} if is_list else answer

        return await stream_events(request, generation, event)

    def _answer(
        self, generation: Generation, index: int, length: int, reason: FinishReason | None, with_log_probs: bool
    ) -> dict[str, Any]:
        sequence = generation.sequences[index]
        spans = sequence.version_spans(length)
        meta: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": reason.to_json() if reason else None,
            "prompt_tokens": len(sequence.prompt_ids),
            "completion_tokens": length,
            "cached_tokens": sequence.cached_tokens,
            "weight_version": spans[-1]["version"] if spans else self.worker.engine.weight_version,
            "weight_versions": spans,
            "e2e_latency": time.time() - generation.started,
        }
        ids = sequence.output_ids[:length]
        if with_log_probs:
            pairs = zip(sequence.log_probs[:length], ids, strict=True)
            meta["input_token_logprobs"] = _prompt_entries(sequence)
            if sequence.prompt_log_probs is not None:
                meta["input_logprob_temperature"] = sequence.prompt_log_probs.temperature
            meta["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in pairs]
        if sequence.return_routed_experts and reason:
            experts = sequence.routed_experts()
            meta["routed_experts"] = None if experts is None else base64.b64encode(experts.tobytes()).decode()
        return {"text": self.text.decode(sequence, length), "output_ids": ids, "meta_info": meta}

    # ---- every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        if self._authorization and request.path != "/health":
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, self._authorization):
                return error_response(401, "the API key is missing or wrong: send 'Authorization: Bearer KEY'")
        if not self.worker.is_alive:
            return error_response(503, "the engine has failed; its log says why")
        try:
            return await handler(request)
        except BadRequest as error:
            return error_response(400, str(error))
        except web.HTTPException as error:
            return error_response(error.status, error.text or error.reason)


def _prompt_entries(sequence: Sequence) -> list[list]:
    """`[log-prob, token id, None]` of each prompt token that they were asked for."""
    wanted = sequence.prompt_log_probs
    if wanted is None:
        return []
    pairs = zip(wanted.values, sequence.prompt_ids[wanted.start :], strict=True)
    return [[value, token, None] for value, token in pairs]


async def read_json(request: web.Request) -> Any:
    """The body, or BadRequest. An empty body is an empty object."""
    raw = await request.read()
    if not raw:
        return {}
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_response(status: int, message: str) -> web.Response:
    kind = "BadRequestError" if status == 400 else "Error"
    return json_response({"error": {"message": message, "type": kind, "code": status}}, status)


async def stream_events(
    request: web.Request, generation: Generation, event: Callable[[int, Snapshot], dict[str, Any]]
) -> web.StreamResponse:
    """Sends `data: {...}` for every update of every sample as it comes, then `data: [DONE]`."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)

    async def send(index: int) -> None:
        async for snapshot in generation.updates(index):
            await response.write(b"data: " + orjson.dumps(event(index, snapshot)) + b"\n\n")

    await asyncio.gather(*(send(index) for index in range(len(generation.sequences))))
    await response.write(b"data: [DONE]\n\n")
    return response
