"""`Session`: one episode of an agent that brings its own loop. What is asked under its key is recorded in its ledger.

    opened ──► requests (one after another, or several at a time) ──► ended ──► samples()
                 │ the engine fails, or the rollout is aborted                    │
                 └──► the agent is told, and `samples`, `run` and the end of the session raise the reason

Invariants:
1. A key opens one session, and after its end none: a later request gets an error, and is not generated.
2. A request whose client has gone is aborted, and leaves nothing in the ledger.
3. What the agent gets is what is recorded: the text of the sampled ids, or the calls of tools that are in it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import xxhash

from colloid.agents.chat import Answer, Call, ChatRequest, ContextFull, Generate, RequestError, Sampled, Token
from colloid.agents.processes import AgentProcesses
from colloid.agents.tool_calls import call_opening, parse_tool_calls, template_format
from colloid.data.ledger import Request, TokenLedger
from colloid.data.sample import Sample, Status
from colloid.data.turns import TurnRenderer
from colloid.errors import DataError, HookError

MESSAGES = "messages"
"""In the metadata of a sample: its conversation, as the agent sent it, with the last answer."""
RUN_TIMEOUT = 600.0
"""Seconds that `Session.run` gives a function, unless told otherwise."""


class Session:
    """What `async with colloid.agents.session(…)` gives. Its requests run in the context in which it is made.

    Args:
        renderer: of the policy's tokenizer and chat template.
        generate: samples from prompt ids.
        processes: where `run` runs functions.

    Attributes:
        base_url: of OpenAI's API, `http://127.0.0.1:PORT/v1`.
        anthropic_base_url: of Anthropic's, `http://127.0.0.1:PORT`.
        api_key: of this session alone.
    """

    def __init__(
        self,
        sample: Sample,
        renderer: TurnRenderer,
        chat_template: str | None,
        generate: Generate,
        processes: AgentProcesses,
    ):
        self.base_url = self.anthropic_base_url = self.api_key = ""
        self.sample = sample
        self._renderer = renderer
        self._format = template_format(chat_template)
        self._generate = generate
        self._processes = processes
        self._ledger = TokenLedger(renderer)
        self._context = contextvars.copy_context()
        self._asked: Counter[int] = Counter()
        self._running: set[asyncio.Task] = set()
        self._status = Status.COMPLETED
        self._messages: list[dict[str, Any]] = []
        self.ended = False
        self.collected = False
        """Whether `samples` was called."""
        self.failure: Exception | None = None
        """Why the episode cannot be used, where that is not the agent's doing."""

    @property
    def num_turns(self) -> int:
        """Answers that were recorded."""
        return self._ledger.num_turns

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation of the last answer, with it."""
        return list(self._messages)

    async def run(self, function: Callable[..., Any], *args: Any, timeout: float = RUN_TIMEOUT, **keywords: Any) -> Any:
        """Runs a function (a plain one or `async`) in a process of its own, and returns what it returns.

        Args:
            function: of a file or a module, not defined inside another function. Its arguments are pickled, and its
                result is JSON.
            timeout: seconds, after which the process is killed with all that it has started.

        Raises:
            HookError: the function raised, took too long, or its process ended.
        """
        try:
            return await self._processes.run(function, args, keywords, timeout)
        except HookError as error:
            if self.failure is not None:
                raise self.failure from error
            raise

    def samples(self, reward: float | dict[str, Any] | None = None) -> list[Sample]:
        """What was recorded, for the generate function to return: the sample, and before it the branches that the
        episode left (`docs/multi_turn.md`). No request is answered any more.

        Args:
            reward: of the sample. None: what `sample.reward` holds, and where that is None the run's own grader says.
                The branches share it.

        Raises:
            HookError: the agent has asked for nothing.
            EngineError: the engine failed, or the rollout was aborted.
        """
        self.ended = self.collected = True
        if self.failure is not None:
            raise self.failure
        sample = self.sample
        sample.reward = sample.reward if reward is None else reward
        if not self._ledger.num_turns:
            if self._status is Status.TRUNCATED:
                sample.status = Status.TRUNCATED
                return [sample]
            raise HookError(
                f"the agent of sample {sample.index} got no answer: it must use the session's base_url and api_key"
            )
        sample.status = self._status
        sample.metadata[MESSAGES] = self.messages
        return self._ledger.samples(sample)

    async def complete(self, request: ChatRequest) -> Answer:
        """Generates and records one answer.

        Raises:
            RequestError: what the client is to be told.
        """
        if self.ended or self.failure is not None:
            raise self._over()
        task = self._context.run(_start, self._complete(request))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.ended:
                raise self._over() from None
            raise
        finally:
            self._running.discard(task)

    async def close(self) -> None:
        """Ends the session: what is being generated is aborted."""
        self.ended = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _complete(self, request: ChatRequest) -> Answer:
        opening = self._opening(request)
        messages = [*request.messages, {"role": "assistant", "content": opening}] if opening else request.messages
        try:
            prompt = self._ledger.request(messages, request.tools)
        except DataError as error:
            raise RequestError(str(error), param="messages") from error
        sampled = await self._sample(prompt, request)
        begun = messages[-1]["content"] if prompt.continues else ""
        text, stop = self._said(sampled, request)
        answer_id = f"{xxhash.xxh3_64_intdigest(repr((prompt.ids, sampled.ids)).encode()):016x}"
        content, calls = self._read(begun, text, request, answer_id, opened=bool(opening))
        made = {"role": "assistant", "content": content, **({"tool_calls": _as_sent(calls)} if calls else {})}
        if sampled.ids:
            forms = _forms(begun, self._renderer.text(sampled.ids), text, made)
            recorded = (sampled.ids, sampled.log_probs, sampled.versions)
            self._ledger.record(prompt, *recorded, *forms, experts=sampled.experts)
        self._status = Status.TRUNCATED if sampled.truncated else Status.COMPLETED
        self._messages = [*request.messages, made]
        return Answer(
            answer_id,
            content,
            calls,
            sampled.truncated,
            stop,
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(sampled.ids),
            tokens=self._tokens(sampled) if request.log_probs else [],
        )

    async def _sample(self, prompt: Request, request: ChatRequest) -> Sampled:
        """What the engine samples. The seed follows from the ids (and how often they were asked for), not from the
        order of requests, which differs from run to run where an agent sends several at a time.
        """
        asked = xxhash.xxh3_64_intdigest(repr(prompt.ids).encode())
        draw, self._asked[asked] = asked + self._asked[asked], self._asked[asked] + 1
        try:
            return await self._generate(prompt.ids, request, draw)
        except ContextFull:
            self._status = Status.TRUNCATED
            raise
        except RequestError:
            raise
        except Exception as error:  # The client hears of it, and the rollout.
            self.failure = self.failure or error
            raise self._over() from error

    def _opening(self, request: ChatRequest) -> str:
        """What the answer is made to begin with, so that it calls a tool; it is not trained."""
        if not request.forced:
            return ""
        if request.messages[-1]["role"] == "assistant":
            raise RequestError("tool_choice cannot ask for a tool where the last message is the assistant's")
        opening = call_opening(self._format, request.forced_name)
        if not opening:
            raise RequestError("tool_choice must name a tool: calls begin with its name here", param="tool_choice")
        return opening

    def _said(self, sampled: Sampled, request: ChatRequest) -> tuple[str, str | None]:
        """The text without the client's stop string that ended it; and that string."""
        text = self._renderer.shown(sampled.ids) if sampled.truncated else self._renderer.text(sampled.ids)
        ended = [(text.rfind(stop), stop) for stop in request.stop if not sampled.truncated and stop in text]
        if not ended or sampled.stop not in request.stop:
            return text, None
        place, stop = max(ended)
        return text[:place], stop

    def _read(
        self, begun: str, text: str, request: ChatRequest, answer_id: str, *, opened: bool
    ) -> tuple[str, list[Call]]:
        """What is said and what is called."""
        whole = begun + text
        said = whole if opened else text
        if not request.tools or not request.parse_calls:
            return said, []
        parsed = parse_tool_calls(whole, self._format, request.tools)
        if not parsed.calls:
            return said, []
        found = parsed.calls if request.parallel_calls else parsed.calls[:1]
        names = (self._call_id(call.name, number, answer_id) for number, call in enumerate(found))
        return parsed.content, [Call(name, call.name, call.arguments) for name, call in zip(names, found, strict=True)]

    def _call_id(self, name: str, number: int, answer_id: str) -> str:
        """Kimi's template shows the model the ids, in this form; the others show none."""
        return f"functions.{name}:{number}" if self._format == "kimi" else f"call_{answer_id}{number}"

    def _tokens(self, sampled: Sampled) -> list[Token]:
        log_probs = sampled.log_probs or [0.0] * len(sampled.ids)
        return [Token(self._renderer.shown([one]), value) for one, value in zip(sampled.ids, log_probs, strict=True)]

    def _over(self) -> RequestError:
        why = "this session has ended" if self.failure is None else f"this session has failed: {self.failure}"
        return RequestError(f"{why}; its key opens nothing any more", status=410, code="session_ended")


def _start(coroutine: Coroutine) -> asyncio.Task:
    return asyncio.ensure_future(coroutine)


def _as_sent(calls: list[Call]) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def _forms(begun: str, sampled: str, text: str, made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """How clients may send the message back: as they got it, as it was sampled, without the thoughts."""
    texts = {made["content"], text, sampled, begun + text, begun + sampled}
    texts |= {one.rpartition("</think>")[2].strip() for one in texts}
    if made.get("tool_calls"):
        texts.add("")
    for one in texts:
        yield {**made, "content": one}
    if made.get("tool_calls"):
        yield {"role": "assistant", "content": begun + sampled}
