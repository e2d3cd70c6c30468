"""Who runs, who waits, who shares a prompt: plain Python over plain data, no tensors.

A request's life: waiting -> (prefill of its prompt, or joining a prefix that is already in the cache) -> running ->
finished. Admission is first come, first served, and reserves every page that the sample can come to need (prompt and
max_new_tokens): once admitted, a sample never runs out of room, is never evicted, and its result never depends on
memory pressure. Reserving is counting; pages are written, and memory used, only as tokens come.

Samples with the same prompt share its full pages, whether they came in one request or in several, as long as one of
them is still in the engine. The last, partly filled page of the prompt is copied to each.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field

from colloid.engines.contract_fields import BadRequest
from colloid.engines.embedded.pages import PageTable
from colloid.engines.embedded.request import FinishReason, Prefix, Sequence

_OWN = b"\xff" * 8
"""Begins the key of a prompt that is not shared; no prompt begins with the token id -1."""


@dataclass(eq=False)
class Prefill:
    """A prompt on its way into the cache, chunk by chunk; `done` tokens of `token_ids` are there."""

    token_ids: tuple[int, ...]
    prefix: Prefix
    members: list[Sequence]
    done: int = 0


@dataclass
class Admitted:
    """What a scheduling step has to do before decoding goes on: chunks to compute, samples to join a prefix."""

    chunks: list[tuple[Prefill, int]] = field(default_factory=list)
    joining: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns the queues and the page bookkeeping. `chunk_tokens` must be a multiple of `page_size`."""

    def __init__(self, pages: PageTable, page_size: int, max_running: int, context_length: int, chunk_tokens: int):
        self.pages = pages
        self.page_size = page_size
        self.max_running = max_running
        self.context_length = context_length
        self.chunk_tokens = chunk_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefills: list[Prefill] = []
        self.running: list[Sequence] = []
        self._prefixes: dict[bytes, Prefix] = {}
        self._reserved = 0

    @property
    def num_running(self) -> int:
        return len(self.running) + sum(len(prefill.members) for prefill in self.prefills)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefills or self.running)

    def check_fits(self, prompt_length: int, max_new_tokens: int) -> None:
        """Raises BadRequest for what could never run."""
        total = prompt_length + max_new_tokens
        if prompt_length > self.context_length:
            raise BadRequest(
                f"The input ({prompt_length} tokens) is longer than the model's context length "
                f"({self.context_length} tokens)."
            )
        if total > self.context_length:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {self.context_length} tokens. "
                f"You requested a total of {total} tokens: {prompt_length} tokens from the input messages and "
                f"{max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input "
                f"messages or the completion to fit within the limit."
            )
        if self._pages_for(total) > self.pages.capacity:
            raise BadRequest(
                f"The request needs {total} tokens of key-value cache ({prompt_length} for the prompt and "
                f"{max_new_tokens} for the completion), but the engine has room for "
                f"{self.pages.capacity * self.page_size}: raise --max-total-tokens or --mem-fraction-static, or ask "
                f"for fewer tokens."
            )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> Admitted:
        """Admits what fits, in order of arrival, and hands out the next chunks to compute."""
        step = Admitted()
        while self.waiting and self.num_running + len(step.joining) < self.max_running:
            sequence = self.waiting[0]
            if not self._reserve(sequence):
                break
            self.waiting.popleft()
            if sequence.prefix.is_ready:
                step.joining.append(sequence)
        budget = self.chunk_tokens
        for prefill in self.prefills:
            length = min(len(prefill.token_ids) - prefill.done, self.chunk_tokens)
            if step.chunks and length > budget:
                break
            step.chunks.append((prefill, length))
            budget -= length
        return step

    def start_running(self, prefill: Prefill) -> None:
        """Its prompt is in the cache: its members become rows of the decode batch."""
        self.prefills.remove(prefill)
        prefill.prefix.is_ready = True
        self.running += prefill.members

    def release(self, sequence: Sequence) -> None:
        """Takes a sample out, wherever it is, and frees what only it used."""
        if sequence.prefix is None:
            self.waiting.remove(sequence)
            return
        if sequence in self.running:
            position = self.running.index(sequence)
            last = self.running.pop()
            if last is not sequence:
                self.running[position] = last
        prefix = sequence.prefix
        for prefill in [p for p in self.prefills if p.prefix is prefix]:
            prefill.members.remove(sequence)
            if not prefill.members:
                self.prefills.remove(prefill)
        self._free(sequence)

    def retract_all(self) -> None:
        """Puts everything that was admitted back in front of the queue; what was generated stays."""
        back = self.running + [member for prefill in self.prefills for member in prefill.members]
        for sequence in back:
            self._free(sequence)
        self.running, self.prefills = [], []
        self.waiting.extendleft(reversed(back))

    def forget_prefixes(self) -> None:
        """No later request shares what is in the cache now; prompts that are half computed begin anew."""
        self._prefixes.clear()
        for prefill in self.prefills:
            prefill.done = 0
            self._prefixes[prefill.prefix.key] = prefill.prefix

    def in_engine(self) -> list[Sequence]:
        prefilling = [member for prefill in self.prefills for member in prefill.members]
        return [*self.waiting, *prefilling, *self.running]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _reserve(self, sequence: Sequence) -> bool:
        """Joins or makes the prefix of a waiting sample, if its pages are to be had."""
        token_ids = sequence.prompt_ids + tuple(sequence.output_ids)
        is_own = sequence.prompt_log_probs is not None
        key = _OWN + sequence.rid.encode() if is_own else array("q", token_ids).tobytes()
        prefix = self._prefixes.get(key)
        total = self._pages_for(len(sequence.prompt_ids) + sequence.max_new_tokens)
        full = len(token_ids) // self.page_size
        needed = total - full if prefix else total
        if self._reserved + needed > self.pages.capacity:
            return False
        self._reserved += needed
        sequence.reserved_pages = total - full
        if prefix is None:
            prefix = Prefix(key, len(token_ids), full)
            self._prefixes[key] = prefix
            self.prefills.append(Prefill(token_ids, prefix, []))
        else:
            sequence.cached_tokens = prefix.length
        sequence.prefix = prefix
        prefix.members.append(sequence)
        if not prefix.is_ready:
            next(p for p in self.prefills if p.prefix is prefix).members.append(sequence)
        return True

    def _free(self, sequence: Sequence) -> None:
        prefix = sequence.prefix
        prefix.members.remove(sequence)
        self._reserved -= sequence.reserved_pages
        for page in sequence.pages:
            self.pages.release(page)
        if not prefix.members:
            self._reserved -= prefix.num_full_pages
            for page in prefix.pages:
                self.pages.release(page)
            prefix.pages.clear()
            if self._prefixes.get(prefix.key) is prefix:
                del self._prefixes[prefix.key]
        sequence.pages.clear()
        sequence.prefix, sequence.num_computed = None, 0


def aborted(message: str) -> FinishReason:
    return FinishReason("abort", message=message)
