"""`TokenLedger`: what one rollout sampled over all its turns, as token ids. Nothing is ever tokenised again.

    request(messages) ──► ids to generate from ──► record(request, sampled ids, log-probs, versions, message)
         │
         ├── begins like a recorded conversation: its ids as they are, and behind them the ids of what was appended
         ├── leaves a recorded conversation half-way (an earlier message differs, or is missing): a new branch
         └── is new: rendered as a whole

    branch 0   prompt │ turn 0 │ tool │ turn 1 │ tool │ turn 2
    branch 1   prompt   turn 0   tool │ turn 3                    leaves branch 0 after turn 0

Invariants:
1. The ids that `request` gives are those that the branch will hold before the sampled ones, one by one.
2. Each sampled token is in exactly one sample with mask 1, with its log-prob and weight version. In the branches that
   left its own later it is context, mask 0.
3. Everything else (prompts, tool output, what the template writes between turns) has mask 0.
4. A request that is never recorded leaves nothing behind.

    ledger = TokenLedger(TurnRenderer(tokenizer))
    request = ledger.request(messages, tools)
    …                                                          # generate from request.ids
    ledger.record(request, ids, log_probs, versions, {"role": "assistant", "content": text})
    samples = ledger.samples(sample)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from colloid.data.groups import copy_sample
from colloid.data.prompts import Messages
from colloid.data.sample import Sample
from colloid.data.turns import TurnRenderer, as_object

FORKED = "forked"
"""In the metadata of a sample: it is a branch that the rollout left. It has the reward of the rollout's last one."""
REWRITTEN = "rewritten_turns"
"""In the metadata of a sample: turns before which the chat template would show the history otherwise by now (it drops
thoughts, say). They were sampled, and are trained, with the history as it was sampled."""


@dataclass(frozen=True)
class Request:
    """One request for the next turn."""

    ids: list[int]
    """Generate from these."""
    keys: tuple[Any, ...]
    tools: str
    branch: int | None
    """The branch that it goes on with, or leaves; None: it shares nothing with any."""
    turn: int
    """The last turn of that branch that it has."""
    continues: bool
    """It goes on with its last message, which is the assistant's, rather than with a new one."""
    text: str
    """Of the ids."""
    rewritten: bool = False
    """The chat template would show the conversation otherwise than it was sampled: it drops thoughts, or the client
    wrote a message down in another way."""


@dataclass(frozen=True)
class _Turn:
    start: int
    end: int
    num_messages: int
    """Of the conversation, up to this turn's."""
    log_probs: list[float] | None
    versions: list[int]
    forms: frozenset[str]
    """Keys under which its message may come back."""
    context: str
    """The text before it."""
    text: str
    own: bool = True
    """Sampled in this branch, not in the one that it left."""


@dataclass
class _Branch:
    tools: str
    keys: list[Any]
    """Of the messages up to the last sampled one; of a sampled one its `forms`."""
    ids: list[int] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    experts: Any = None
    """Of all ids but the last, as the last request's answer says."""


class TokenLedger:
    """One rollout's turns. Not thread-safe; requests may overlap."""

    def __init__(self, renderer: TurnRenderer):
        self._renderer = renderer
        self._branches: list[_Branch] = []
        self._last: int | None = None
        self.num_rewritten = 0
        """Recorded turns whose request was `rewritten`. What was sampled stays in the context as it was sampled."""

    @property
    def num_turns(self) -> int:
        """Recorded turns, of all branches."""
        return sum(turn.own for branch in self._branches for turn in branch.turns)

    @property
    def num_branches(self) -> int:
        return len(self._branches)

    def request(self, messages: Messages, tools: list | None = None) -> Request:
        """The ids to generate the next turn of this conversation from.

        Args:
            messages: the whole conversation, as clients send it. A last message of the assistant's is continued.
            tools: of the chat template. Other ones than before begin a new branch.

        Raises:
            DataError: the chat template refuses the messages.
        """
        keys, tools_key = tuple(message_key(message) for message in messages), _canonical(tools)
        continues = messages[-1].get("role") == "assistant"
        found = self._longest(keys, tools_key)
        if found is None:
            ids, text = self._renderer.prompt(messages, tools)
            return Request(ids, keys, tools_key, None, 0, continues, text)
        number, place = found
        turn = self._branches[number].turns[place]
        ids, text = self._branches[number].ids[: turn.end], turn.context + turn.text
        if turn.num_messages == len(keys):
            return Request(ids, keys, tools_key, number, place, continues, text)
        new = self._renderer.appended(messages, turn.num_messages - 1, ids[-1], tools)
        ids, text = ids + new.ids, text + new.text
        rewritten = self._renderer.render(messages, tools) != text
        return Request(ids, keys, tools_key, number, place, continues, text, rewritten)

    def record(
        self,
        request: Request,
        ids: list[int],
        log_probs: list[float] | None,
        versions: int | list[int] | None,
        *messages: dict[str, Any],
        experts: Any = None,
    ) -> None:
        """Appends a turn that was sampled from `request.ids`.

        Args:
            ids: as sampled, with the token that ended them; at least one.
            log_probs: one a token; None: unknown.
            versions: weight version of all these tokens, or one a token; None: unknown.
            messages: the assistant's message, in each of the forms in which later requests may hold it. Whole: with
                its beginning, where the request continued one.
            experts: that the engine chose for all tokens of the request and of this turn but the last; None: unknown.

        Raises:
            ValueError: the arrays have different lengths, or no ids or messages are given.
        """
        if not ids or not messages:
            raise ValueError("a turn has at least one token and one message")
        versions = versions if isinstance(versions, list) else [-1 if versions is None else int(versions)] * len(ids)
        if len(versions) != len(ids) or (log_probs is not None and len(log_probs) != len(ids)):
            raise ValueError(f"{len(log_probs or [])} log-probs and {len(versions)} versions for {len(ids)} tokens")
        number = self._branch_for(request)
        branch = self._branches[number]
        kept = branch.turns[-1].num_messages if branch.turns else 0
        keys = [*branch.keys[:kept], *request.keys[kept:]]
        if request.continues:
            keys.pop()
        forms = frozenset(message_key(message) for message in messages)
        branch.keys = [*keys, forms]
        branch.ids, branch.experts = [*request.ids, *ids], experts
        start = len(request.ids)
        text = self._renderer.shown(ids)
        turn = _Turn(start, start + len(ids), len(branch.keys), log_probs, versions, forms, request.text, text)
        branch.turns.append(turn)
        self._last = number
        self.num_rewritten += request.rewritten

    def samples(self, sample: Sample) -> list[Sample]:
        """The branches as samples, in the order in which they began; those without a turn of their own are left out.

        The one that was recorded last is `sample` itself, whose tokens, mask, log-probs and versions are set. The
        others are copies of it, `FORKED` in their metadata. They share its `rollout_id`, and so weigh as one rollout.
        Where a turn's request was `rewritten`, the metadata says how many were (`REWRITTEN`).

        Raises:
            ValueError: nothing was recorded, or some turns have log-probs and others not.
        """
        if self._last is None:
            raise ValueError(f"no turn of sample {sample.index} was recorded")
        if self.num_rewritten:
            sample.metadata[REWRITTEN] = self.num_rewritten
        if len(self._branches) > 1 and sample.rollout_id is None:
            sample.rollout_id = sample.index
        made = []
        for number, branch in enumerate(self._branches):
            one = sample if number == self._last else _copy(sample)
            self._fill(one, branch)
            made.append(one)
        return made

    def _longest(self, keys: tuple[Any, ...], tools: str) -> tuple[int, int] | None:
        """Branch and turn of the longest recorded conversation that these messages begin with."""
        best, most = None, 0
        for number, branch in enumerate(self._branches):
            if branch.tools != tools:
                continue
            same = _common(branch.keys, keys)
            for place, turn in enumerate(branch.turns):
                # Of two turns that are one message (continued), the later one.
                if turn.num_messages <= same and (turn.num_messages, turn.end) > (most, 0 if best is None else best[2]):
                    best, most = (number, place, turn.end), turn.num_messages
        return None if best is None else best[:2]

    def _branch_for(self, request: Request) -> int:
        """The branch that a recorded turn goes to: the request's, if nothing was recorded there since; else a new one,
        which shares the turns up to the request's.
        """
        if request.branch is None:
            self._branches.append(_Branch(request.tools, []))
            return len(self._branches) - 1
        branch = self._branches[request.branch]
        if request.turn == len(branch.turns) - 1:
            return request.branch
        turns = [replace(turn, own=False) for turn in branch.turns[: request.turn + 1]]
        keys = [*branch.keys[: turns[-1].num_messages - 1], turns[-1].forms]
        self._branches.append(_Branch(request.tools, keys, branch.ids[: turns[-1].end], turns))
        return len(self._branches) - 1

    def _fill(self, sample: Sample, branch: _Branch) -> None:
        sample.response_length, sample.loss_mask = 0, None
        sample.rollout_log_probs, sample.weight_versions = None, []
        sample.rollout_routed_experts = branch.experts
        own = [turn for turn in branch.turns if turn.own]
        position = own[0].start
        sample.tokens = branch.ids[:position]
        for turn in own:
            if turn.start > position:
                sample.append_response_tokens(branch.ids[position : turn.start], trained=False)
            sample.append_response_tokens(
                branch.ids[turn.start : turn.end], log_probs=turn.log_probs, weight_version=turn.versions
            )
            position = turn.end
        sample.response = self._renderer.text(branch.ids[own[0].start :])


def message_key(message: dict[str, Any]) -> str:
    """What makes two messages the same, however a client writes them down: role, text, calls of tools, and which call
    a tool message answers. White space around the assistant's text does not count, nor do its recorded thoughts.
    """
    role, content = message.get("role"), _content(message.get("content"))
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call
        calls.append([function.get("name"), as_object(function.get("arguments"))])
    if role == "assistant":
        content = content.strip() if isinstance(content, str) else content
    return _canonical([role, content, calls, message.get("tool_call_id") if role == "tool" else None])


def _content(content: Any) -> Any:
    """Texts in parts as one text; None as an empty one."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=repr)


def _common(recorded: list[Any], keys: tuple[Any, ...]) -> int:
    """How many messages from the first on are the same."""
    most = min(len(recorded), len(keys))
    pairs = zip(recorded[:most], keys[:most], strict=True)
    same = (key in one if isinstance(one, frozenset) else one == key for one, key in pairs)
    return next((number for number, agrees in enumerate(same) if not agrees), most)


def _copy(sample: Sample) -> Sample:
    other = copy_sample(sample)
    other.metadata[FORKED] = True
    return other
