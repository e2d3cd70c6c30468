"""One request for a message and its answer, as both wire formats (openai.py, anthropic.py) read and write them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

PIECE = 24
"""Characters of one event of a stream."""


class RequestError(Exception):
    """A request that gets no answer but an error, in the shape of the API that it came by.

    Attributes:
        status: of HTTP.
        code: OpenAI's, which programs compare.
        param: the field that is wrong.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param

    @property
    def kind(self) -> str:
        """The `type` of the error; the same words in both APIs."""
        names = {401: "authentication_error", 404: "not_found_error"}
        return names.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")


class ContextFull(RequestError):
    """The conversation leaves no room for an answer."""

    def __init__(self, num_tokens: int, limit: int):
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {num_tokens} "
            "tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )
        self.num_tokens, self.limit = num_tokens, limit


@dataclass(frozen=True)
class ChatRequest:
    """What is asked for. Messages and tools are as OpenAI's API has them, reduced to what chat templates read."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    parse_calls: bool = True
    """Whether calls of tools are looked for (`tool_choice` is not `none`)."""
    forced: bool = False
    """A tool must be called: `forced_name`, or any."""
    forced_name: str | None = None
    parallel_calls: bool = True
    """Whether a message may have several calls."""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Temperature, top_p, top_k, where the client gives them."""
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    log_probs: bool = False


@dataclass(frozen=True)
class Sampled:
    """What the engine sampled: one log-prob and one weight version a token."""

    ids: list[int]
    log_probs: list[float] | None
    versions: list[int]
    truncated: bool
    stop: str | None = None
    """The stop string that ended it."""
    experts: Any = None
    """See `TokenLedger.record`."""


Generate = Callable[[list[int], ChatRequest, int], Awaitable[Sampled]]
"""`(prompt ids, request, draw)`: samples; `draw` tells requests of one session apart, for the seed.

Raises `RequestError` for what the client is to be told, and anything else where the whole session fails."""


@dataclass(frozen=True)
class Call:
    """One call of a tool in an answer."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Token:
    """One sampled token, for clients that ask for log-probs."""

    text: str
    log_prob: float


@dataclass(frozen=True)
class Answer:
    """The assistant's message."""

    id: str
    content: str
    calls: list[Call]
    truncated: bool
    stop: str | None
    """The client's stop string that ended it; not part of the content."""
    prompt_tokens: int
    completion_tokens: int
    tokens: list[Token] = field(default_factory=list)


def pieces(text: str) -> Iterator[str]:
    """A text in the pieces in which it is streamed."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def read(body: dict[str, Any], name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
    """A field of a request, checked; null counts as left out.

    Raises:
        RequestError: it has another type.
    """
    value = body.get(name)
    if value is None:
        return default
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise RequestError(f"{name!r} must be {wanted}, not {value!r:.80}", param=name)
    return value


def positive(body: dict[str, Any], name: str) -> int | None:
    """A field that is a whole number above 0.

    Raises:
        RequestError: it is something else.
    """
    value = read(body, name, int)
    if value is not None and value < 1:
        raise RequestError(f"{name!r} must be at least 1, not {value}", param=name)
    return value


def sampling_of(body: dict[str, Any]) -> dict[str, Any]:
    """Temperature, top_p and top_k of a request.

    Raises:
        RequestError: one is out of its range.
    """
    bounds = {"temperature": (0, 2), "top_p": (0, 1), "top_k": (-1, 2**31)}
    values = {name: read(body, name, (int, float)) for name in bounds}
    for name, (low, high) in bounds.items():
        if values[name] is not None and not low <= values[name] <= high:
            raise RequestError(f"{name!r} must be from {low} to {high}, not {values[name]}", param=name)
    return {name: value for name, value in values.items() if value is not None}


def stops_of(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """Stop strings: a text, or a list of texts.

    Raises:
        RequestError: something else, or an empty text.
    """
    value = read(body, name, (str, list), [])
    value = [value] if isinstance(value, str) else value
    if not all(isinstance(one, str) and one for one in value):
        raise RequestError(f"{name!r} must be texts that are not empty, not {value!r:.80}", param=name)
    return tuple(value)


def messages_of(body: dict[str, Any]) -> list[Any]:
    """The field `messages`: a list that is not empty.

    Raises:
        RequestError: it is something else.
    """
    messages = read(body, "messages", list)
    if not messages:
        raise RequestError("'messages' must be a list of at least one message", param="messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{number}] must be an object, not {message!r:.80}", param="messages")
    return messages
