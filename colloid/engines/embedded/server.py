"""The HTTP face of the embedded engine: SGLang's routes, answered from one event loop.

Bodies are parsed into the records of `colloid.engines.contract` and everything malformed is answered with 400. The
engine itself lives in the compute thread: handlers hand it functions and await what they return. A client that goes
away takes its samples with it.
"""

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from colloid.engines.contract_fields import BadRequest
from colloid.engines.contract_generate import GenerateInput, GenerateRequest
from colloid.engines.embedded.answers import AnswerWriter
from colloid.engines.embedded.memory import Occupation
from colloid.engines.embedded.request import FinishReason, Sequence
from colloid.engines.embedded.text import Text
from colloid.engines.embedded.update import WeightUpdates
from colloid.engines.embedded.weights import WeightStore
from colloid.engines.embedded.worker import Worker

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 20
BODY_SECONDS = 120
"""In which a request's body has to come."""
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

    async def submit(self, check: Callable[[], None]) -> None:
        """Queues the samples, unless `check` raises: it is called in the compute thread, where nothing can change
        between it and that. Cancelled meanwhile, they end.
        """

        def add() -> None:
            check()
            self.worker.engine.add(self.sequences)

        try:
            await self.worker.call(add)
        except asyncio.CancelledError:
            self.cancel()  # the compute thread may have them, or comes to have them
            raise

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
        self.started = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/generate", self.generate)
        return app

    # ---- generation, for all endpoints that generate

    async def start(self, prompts: list[GenerateInput], stream: bool) -> Generation:
        """Tokenises, checks and queues the prompts of a request. Raises BadRequest, and HTTPServiceUnavailable."""
        self._check_ready()
        has_text = any(prompt.text is not None for prompt in prompts)
        if has_text or any(prompt.params.stop for prompt in prompts) or self.text.available:
            await asyncio.to_thread(lambda: self.text.tokenizer)
        prompt_ids = await asyncio.to_thread(self._encode, prompts) if has_text else self._encode(prompts)
        generation = Generation(self.worker)
        for prompt, ids in zip(prompts, prompt_ids, strict=True):
            generation.prepare(replace(prompt, rid=prompt.rid or uuid.uuid4().hex), ids, stream)
        await generation.submit(self._check_ready)  # memory may have been released since
        return generation

    def _check_ready(self) -> None:
        if reason := self.memory.why_not_ready():
            raise web.HTTPServiceUnavailable(text=reason)
        if self.updates.is_broken:
            raise web.HTTPServiceUnavailable(text="the last weight update was not completed: send a complete one")

    def _encode(self, prompts: list[GenerateInput]) -> list[tuple[int, ...]]:
        for prompt in prompts:
            if prompt.text is not None:
                self.text.check_length(prompt.text, self.info.context_length)
        return [self.text.encode(prompt.text) if prompt.input_ids is None else prompt.input_ids for prompt in prompts]

    async def chat_ids(self, messages: list[dict[str, Any]], variables: dict[str, Any] | None) -> tuple[int, ...]:
        """The token ids of a conversation. Raises BadRequest."""

        def apply() -> tuple[int, ...]:
            for message in messages:
                self.text.check_length(message["content"], self.info.context_length)
            return self.text.apply_chat_template(messages, variables)

        return await asyncio.to_thread(apply)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = GenerateRequest.from_json(await read_json(request))
        if body.return_text_in_logprobs and not self.text.available:
            raise BadRequest("return_text_in_logprobs: the engine has no tokenizer")
        generation = await self.start(list(body.inputs), body.stream)
        writer = AnswerWriter(
            self.text, lambda: self.worker.engine.weight_version, body.return_text_in_logprobs, generation.started
        )
        logprobs = [p.return_logprob for p in body.inputs for _ in range(p.params.n)]
        is_list = body.is_batch or len(generation.sequences) > 1

        def event(index: int, snapshot: Snapshot) -> dict[str, Any]:
            """All that came so far; those of several samples carry their `index`."""
            sequence, reason = generation.sequences[index], snapshot.finish_reason
            answer = writer.answer(sequence, snapshot.length, reason, logprobs[index])
            return {**answer, "index": index} if is_list else answer

        try:
            if body.stream:
                return await stream_events(request, generation, event)
            await generation.finished()
        except BaseException:
            generation.cancel()
            raise
        answers = [
            writer.answer(sequence, len(sequence.output_ids), sequence.finish_reason, with_log_probs)
            for sequence, with_log_probs in zip(generation.sequences, logprobs, strict=True)
        ]
        return json_response(answers if is_list else answers[0])

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
        except ConnectionResetError:
            logger.debug("the client of %s has gone", request.path)
            return error_response(400, "the client has gone")
        except web.HTTPException as error:
            return error_response(error.status, f"{request.method} {request.path}: {error.text or error.reason}")


async def read_json(request: web.Request) -> Any:
    """The body, or BadRequest. An empty body is an empty object."""
    if request.content_length and request.content_length > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length)
    try:
        raw = await asyncio.wait_for(request.read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_SECONDS} s") from None
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
    request: web.Request,
    generation: Generation,
    event: Callable[[int, Snapshot], dict[str, Any]],
    last: Callable[[], list[dict[str, Any]]] = list,
) -> web.StreamResponse:
    """Sends `data: {...}` for every update of every sample as it comes, the `last` ones, then `data: [DONE]`."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)

    async def send(index: int) -> None:
        async for snapshot in generation.updates(index):
            await response.write(b"data: " + orjson.dumps(event(index, snapshot)) + b"\n\n")

    await asyncio.gather(*(send(index) for index in range(len(generation.sequences))))
    for each in last():
        await response.write(b"data: " + orjson.dumps(each) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response
