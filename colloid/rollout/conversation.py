"""`generate_single`: one turn of a conversation, for generate functions of users. What it samples is recorded.

Each sample that is handed to a user's function has a `Recording`: its token ledger, and how many turns it had. A
conversation is known by its sample: in a function of one sample there is only one; in a function of a whole group it
is the list `sample.prompt`, or one that holds a message (or a text) of that list.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from colloid.agents.sessions import Session
from colloid.data.ledger import TokenLedger
from colloid.data.prompts import Messages
from colloid.data.sample import Sample, Status
from colloid.data.turns import TurnRenderer
from colloid.errors import HookError
from colloid.rollout.client import EngineClient, RequestAborted
from colloid.rollout.generate_sample import record_answer, response_text, routing_of
from colloid.rollout.options import SamplingOptions, request_seed

TEXT_ONLY = "text_only"
"""In the metadata of a sample: its response was not sampled here, so it has no log-probs of the engine."""
MESSAGES = "messages"
"""In the metadata of a sample: its conversation, where a function appended messages to the sample's prompt."""


@dataclass
class Recording:
    """What is recorded of one sample."""

    sample: Sample
    renderer: TurnRenderer
    ledger: TokenLedger = field(init=False)
    prompt: str | Messages = field(init=False)
    """As it was handed to the function."""
    original: str | Messages = field(init=False)
    """A copy of `prompt` that the function does not see."""
    conversations: list[Messages] = field(default_factory=list)
    turns: int = 0
    status: Status = Status.COMPLETED

    def __post_init__(self) -> None:
        self.ledger = TokenLedger(self.renderer)
        if self.sample.status is Status.ABORTED and not self.sample.response_length:
            self.sample.status = Status.PENDING
        self.original = self.sample.prompt
        self.sample.prompt = self.prompt = _own_copy(self.original)

    def owns(self, conversation: Messages) -> bool:
        if any(conversation is known for known in (self.prompt, self.sample.prompt, *self.conversations)):
            return True
        if isinstance(self.prompt, str):
            return any(message.get("content") is self.prompt for message in conversation)
        return any(message is own for message in conversation for own in self.prompt)

    def finish(self, tokenizer: Any) -> list[Sample]:
        """Puts what was recorded into the sample; it, and before it the branches that its rollout left.

        Raises:
            HookError: the function appended tokens to the sample by itself too.
        """
        sample, prompt = self.sample, self.original
        if isinstance(prompt, str):
            sample.prompt = prompt if sample.prompt is self.prompt else sample.prompt
        elif isinstance(sample.prompt, list) and sample.prompt[: len(prompt)] == prompt:
            if len(sample.prompt) > len(prompt):
                sample.metadata[MESSAGES] = sample.prompt
            sample.prompt = prompt
        if sample.status is Status.FAILED:
            return [sample]
        if self.ledger.num_turns:
            if sample.response_length:
                raise HookError(
                    f"sample {sample.index}: generate_single has recorded its tokens, and {sample.response_length} "
                    "were appended by hand; do one or the other"
                )
            if sample.status is Status.PENDING:
                sample.status = self.status
            response = sample.response
            samples = self.ledger.samples(sample)
            sample.response = response or sample.response
            return samples
        if self.status is Status.TRUNCATED and sample.status is Status.PENDING:
            sample.status = Status.TRUNCATED
        if sample.response and not sample.response_length:
            sample.append_response_tokens(tokenizer(sample.response, add_special_tokens=False)["input_ids"])
            sample.metadata[TEXT_ONLY] = True
        return [sample]


class Recordings:
    """Those of the samples that are handed to one call of a user's function.

    Args:
        parse: the forms, beside its text, in which a message may come back: with its calls of tools parsed.
    """

    def __init__(
        self,
        samples: list[Sample],
        client: EngineClient,
        tokenizer: Any,
        sampling: SamplingOptions,
        renderer: Callable[[Sample], TurnRenderer],
        *,
        rollout_id: int,
        parse: Callable[[str], list[dict[str, Any]]],
    ):
        self._recordings = [Recording(sample, renderer(sample)) for sample in samples]
        self._client = client
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._rollout_id = rollout_id
        self._parse = parse
        self._requests = 0
        self._sessions: list[Session] = []

    @property
    def sampling(self) -> SamplingOptions:
        """Of the run, or of the evaluation set."""
        return self._sampling

    @property
    def rollout_id(self) -> int:
        return self._rollout_id

    def renderer_of(self, sample: Sample) -> TurnRenderer:
        """Renders conversations of a sample that the function was called with.

        Raises:
            HookError: it is none of them.
        """
        for recording in self._recordings:
            if recording.sample is sample:
                return recording.renderer
        raise HookError(f"sample {sample.index} is none of those that the generate function was called with")

    def add_session(self, session: Session) -> int:
        """A session that the function opens; its number among those of its sample, from 0."""
        self._sessions.append(session)
        return sum(one.sample is session.sample for one in self._sessions) - 1

    def finish(self, original: Sample, given: list[Sample]) -> list[Sample]:
        """What a function gave back for a sample, with what was recorded of it.

        Raises:
            HookError: turns were recorded, and it gave back other samples, so that nothing says whose they are; or
                it did not take the samples of an agent's session.
        """
        for session in self._sessions:
            kept = [one for one in given if one.status not in (Status.FAILED, Status.ABORTED)]
            if session.sample is original and session.num_turns and not session.collected and kept:
                raise HookError(
                    f"the session of sample {original.index} has recorded {session.num_turns} turns, and they were not "
                    "taken: return what its samples() gives, or set the status FAILED"
                )
        recording = next(one for one in self._recordings if one.sample is original)
        if len(given) == 1:
            recording.sample = given[0]
        elif recording.ledger.num_turns and not any(one is original for one in given):
            raise HookError(
                f"generate_single has recorded {recording.ledger.num_turns} turns of sample {original.index}, which is "
                f"not among the {len(given)} samples that came back for it: return the sample itself"
            )
        return [
            part for one in given for part in (recording.finish(self._tokenizer) if one is recording.sample else [one])
        ]

    def drop(self, *, aborted: bool) -> None:
        """The function did not come to its end: the samples are prompts again."""
        for recording in self._recordings:
            sample = recording.sample
            sample.prompt = recording.original
            if aborted and not sample.response_length:
                sample.status, sample.response, sample.reward = Status.ABORTED, "", None

    def next_seed(self) -> int:
        """The sampling seed of the next request that a function makes by itself (`post`)."""
        turn, self._requests = self._requests, self._requests + 1
        return request_seed(self._sampling.seed, self._rollout_id, self._recordings[0].sample.index or 0, turn)

    async def generate(self, conversation: Messages, tools: list | None, overrides: dict[str, Any]) -> str:
        """One turn; its text."""
        recording = self._find(conversation)
        sample = recording.sample
        tools = sample.metadata.get("tools") if tools is None else tools
        request = recording.ledger.request(conversation, tools)
        turn, recording.turns = recording.turns, recording.turns + 1
        params = self._sampling.request_params(len(request.ids), self._rollout_id, sample.index or 0, turn)
        room = params["max_new_tokens"]
        if self._sampling.max_context_len is not None:
            room = self._sampling.max_context_len - len(request.ids)
        params |= overrides
        params["max_new_tokens"] = min(params["max_new_tokens"], room)
        if params["max_new_tokens"] <= 0:
            recording.status = Status.TRUNCATED
            return ""
        payload = {"input_ids": request.ids, "sampling_params": params, "return_logprob": True}
        if self._sampling.routing is not None:
            payload["return_routed_experts"] = True
        answer = await self._client.generate(
            payload, name=f"turn {turn} of sample {sample.index}", session=f"sample-{sample.index}"
        )
        sampled = Sample(index=sample.index)
        record_answer(sampled, answer)
        if sampled.status is Status.ABORTED:
            raise RequestAborted(f"turn {turn} of sample {sample.index} was aborted")
        recording.status = sampled.status
        if not sampled.tokens:
            return ""
        text = response_text(sampled, answer, self._tokenizer, self._sampling.skip_special_tokens)
        begun = conversation[-1]["content"] if request.continues else ""
        forms = [{"role": "assistant", "content": begun + text}, *self._parse(begun + text)]
        if begun:
            forms.append({"role": "assistant", "content": text})
        experts = None
        if self._sampling.routing is not None:
            experts = routing_of(answer, len(request.ids) + len(sampled.tokens), self._sampling.routing, sample.index)
        recorded = (sampled.tokens, sampled.rollout_log_probs, sampled.weight_versions)
        recording.ledger.record(request, *recorded, *forms, experts=experts)
        return text

    def _find(self, conversation: Messages) -> Recording:
        if not isinstance(conversation, list) or not conversation:
            raise HookError(
                f"generate_single takes a list of messages, not {type(conversation).__name__}: {conversation!r:.100}"
            )
        found = [one for one in self._recordings if one.owns(conversation)] or self._recordings
        if len(found) > 1:
            raise HookError(
                f"generate_single: of which of the {len(found)} samples is this conversation? Give it the list "
                "sample.prompt, or a list that begins with the messages in it (not with copies of them)"
            )
        if not any(conversation is known for known in found[0].conversations):
            found[0].conversations.append(conversation)
        return found[0]


_ACTIVE: contextvars.ContextVar[Recordings | None] = contextvars.ContextVar("colloid_recordings", default=None)


@contextmanager
def use_recordings(recordings: Recordings) -> Iterator[None]:
    """Tasks started inside record there."""
    token = _ACTIVE.set(recordings)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_recordings() -> Recordings | None:
    """Those of the running function; None outside of one."""
    return _ACTIVE.get()


def next_turn_seed() -> int | None:
    """The sampling seed of the next request that the running function makes by itself; None outside of one."""
    recordings = _ACTIVE.get()
    return None if recordings is None else recordings.next_seed()


async def generate_single(conversation: Messages, *, tools: list | None = None, **sampling: Any) -> str:
    """Generates the assistant's next message of a conversation, and returns its text, without the token that ended it.

    What was sampled is recorded for the sample whose `prompt` the conversation is: its ids, log-probs and weight
    versions, to be trained. What was appended since its last turn (tool and user messages) is not trained. The text is
    to be appended by the caller, as an assistant message. An empty text means that the context length is reached.

    Args:
        conversation: messages; in a function of a whole group, `sample.prompt` itself or a list that begins with it.
        tools: for the chat template; None: those of the sample's row.
        **sampling: SGLang's sampling parameters, before those of the run.

    Raises:
        HookError: outside of a generate function, or nothing says of which sample the conversation is.
        DataError: the chat template refuses it.
    """
    recordings = _ACTIVE.get()
    if recordings is None:
        raise HookError("generate_single works only inside the function of --custom-generate-function-path")
    return await recordings.generate(conversation, tools, sampling)


def _own_copy(prompt: str | Messages) -> str | Messages:
    """Equal, but another object, so that a conversation shows whose it is."""
    return "".join([prompt[:1], prompt[1:]]) if isinstance(prompt, str) else copy.deepcopy(prompt)
