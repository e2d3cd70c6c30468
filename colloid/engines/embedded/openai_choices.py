"""What stands in `choices`: of chat completions and completions, whole or as the chunks of a stream."""

from collections import defaultdict
from typing import Any

from colloid.engines.contract_openai import ChatRequest, CompletionRequest
from colloid.engines.embedded.request import FinishReason, LogProb, Sequence
from colloid.engines.embedded.text import Text


class Choices:
    """Writes the choices of one request; of a stream it remembers what was sent."""

    prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, text: Text):
        self.text = text
        self._sent: dict[int, str] = defaultdict(str)
        self._num_sent: dict[int, int] = defaultdict(int)

    def whole(self, index: int, sequence: Sequence) -> dict[str, Any]:
        raise NotImplementedError

    def chunk(self, index: int, sequence: Sequence, length: int, reason: FinishReason | None) -> dict[str, Any]:
        raise NotImplementedError

    def whole_text(self, sequence: Sequence) -> str:
        """Of a sample that has ended."""
        return self.text.decode(sequence, len(sequence.output_ids), sequence.finish_reason)

    def new_text(self, index: int, sequence: Sequence, length: int, reason: FinishReason | None) -> str:
        """What came since the last call; half a character waits for its other half."""
        text = self.text.decode(sequence, length, reason)
        if reason is None:
            text = text.rstrip("\ufffd")
        sent = self._sent[index]
        self._sent[index] = text
        return text[len(sent) :]

    def new_tokens(self, index: int, length: int) -> range:
        begin, self._num_sent[index] = self._num_sent[index], length
        return range(begin, length)


def _ending(reason: FinishReason | None) -> dict[str, Any]:
    matched = {"matched_stop": reason.matched} if reason and reason.type == "stop" else {}
    return {"finish_reason": reason.type if reason else None, **matched}


class ChatChoices(Choices):
    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, text: Text, request: ChatRequest):
        super().__init__(text)
        self._request = request

    def whole(self, index: int, sequence: Sequence) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.whole_text(sequence)}
        logprobs = self._log_probs(sequence, range(len(sequence.output_ids)))
        return {"index": index, "message": message, "logprobs": logprobs, **_ending(sequence.finish_reason)}

    def chunk(self, index: int, sequence: Sequence, length: int, reason: FinishReason | None) -> dict[str, Any]:
        role = {} if self._num_sent[index] else {"role": "assistant"}
        delta = role | {"content": self.new_text(index, sequence, length, reason)}
        logprobs = self._log_probs(sequence, self.new_tokens(index, length))
        return {"index": index, "delta": delta, "logprobs": logprobs, **_ending(reason)}

    def _log_probs(self, sequence: Sequence, positions: range) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        content = []
        for at in positions:
            others = sequence.alternatives.top[at] if sequence.alternatives.num_top else []
            entry = self._entry((sequence.log_probs[at], sequence.output_ids[at]))
            content.append(entry | {"top_logprobs": [self._entry(other) for other in others]})
        return {"content": content}

    def _entry(self, pair: LogProb) -> dict[str, Any]:
        token = self.text.token_text(pair[1])
        return {"token": token, "bytes": list(token.encode()), "logprob": pair[0]}


class CompletionChoices(Choices):
    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, text: Text, request: CompletionRequest):
        super().__init__(text)
        self._request = request

    def whole(self, index: int, sequence: Sequence) -> dict[str, Any]:
        text = self._prompt(index, sequence) + self.whole_text(sequence)
        logprobs = self._log_probs(sequence, range(len(sequence.output_ids)), self._request.echo)
        return {"index": index, "text": text, "logprobs": logprobs, **_ending(sequence.finish_reason)}

    def chunk(self, index: int, sequence: Sequence, length: int, reason: FinishReason | None) -> dict[str, Any]:
        first = not self._num_sent[index]
        text = self.new_text(index, sequence, length, reason)
        logprobs = self._log_probs(sequence, self.new_tokens(index, length), first and self._request.echo)
        text = self._prompt(index, sequence) + text if first else text
        return {"index": index, "text": text, "logprobs": logprobs, **_ending(reason)}

    def _prompt(self, index: int, sequence: Sequence) -> str:
        if not self._request.echo:
            return ""
        given = self._request.prompts[index // self._request.params.n]
        return given if isinstance(given, str) else self.text.tokenizer.decode(sequence.prompt_ids)

    def _log_probs(self, sequence: Sequence, positions: range, with_prompt: bool) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        tokens: list[int] = []
        values: list[float | None] = []
        tops: list[list[LogProb] | None] = []
        if with_prompt and sequence.prompt_log_probs is not None:
            tokens += sequence.prompt_ids
            values += sequence.prompt_log_probs.values
            tops += sequence.prompt_log_probs.alternatives.top
        tokens += [sequence.output_ids[at] for at in positions]
        values += [sequence.log_probs[at] for at in positions]
        others = sequence.alternatives
        tops += [others.top[at] if others.num_top else None for at in positions]
        return {
            "tokens": [self.text.token_text(token) for token in tokens],
            "token_logprobs": values,
            "top_logprobs": [
                None if top is None else {self.text.token_text(token): value for value, token in top} for top in tops
            ]
            if others.num_top
            else None,
            "text_offset": [-1] * len(tokens),
        }
