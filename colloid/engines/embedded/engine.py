"""One rollout engine without its HTTP server: requests in, tokens out, one step at a time.

`Engine` joins the scheduler (who runs), the model and the cache (what is computed) and the sampler. All of its methods
run in one thread, the compute thread (see worker.py).
"""

import random
from collections.abc import Callable, Iterable

import torch

from colloid.engines.contract_fields import BadRequest
from colloid.engines.contract_generate import GenerateInput
from colloid.engines.embedded.attention import QUERY_ROWS, Chunk, DecodeAttention, PrefillAttention, Row
from colloid.engines.embedded.kv_cache import KVCache
from colloid.engines.embedded.linear import MIN_ROWS
from colloid.engines.embedded.logit_changes import LogitChanges
from colloid.engines.embedded.metrics import RequestMetrics
from colloid.engines.embedded.model import Model
from colloid.engines.embedded.pages import PageTable
from colloid.engines.embedded.prompt_logprobs import asked_for, record
from colloid.engines.embedded.request import Alternatives, FinishReason, Prefix, Sequence
from colloid.engines.embedded.sampling import RowParams, alternatives, sample
from colloid.engines.embedded.scheduler import Prefill, Scheduler, aborted
from colloid.engines.embedded.text import Text

# Positions of a page. Larger pages waste reading behind a sequence's end, smaller ones cost more products a step: at 64
# sequences of 96 positions 32 took 42 ms a step in float32, 64 took 57; of 512 in bfloat16 121 and 94.
PAGE_SIZES = {torch.float32: 32, torch.bfloat16: 64}
MIN_PAGES = 8  # decode attention computes over some pages more than are in use where the model is tiny
CHUNK_TOKENS = 512
RID_SEPARATOR = "#"  # sample j of a request with n > 1 is `rid#j`


class Engine:
    """`capacity_tokens`: upper limit of the key-value cache. `min_rows`, `min_query_rows`: see invariance.py.
    `record_experts`: keeps the experts that are chosen for every token, for requests that ask for them.
    """

    def __init__(
        self,
        model: Model,
        text: Text,
        *,
        capacity_tokens: int,
        context_length: int,
        max_running: int,
        random_seed: int = 0,
        min_rows: int = MIN_ROWS,
        min_query_rows: int | None = None,
        record_experts: bool = False,
    ):
        self.model = model
        self.text = text
        model.require_rows(min_rows)
        page_size = PAGE_SIZES[model.dtype]
        num_pages = max(capacity_tokens // page_size, MIN_PAGES)
        self._pages = PageTable(num_pages, lambda source, destination: self._cache.copy_page(source, destination))
        self._cache = KVCache(model.config, self._pages.size, page_size, model.dtype)
        self.scheduler = Scheduler(self._pages, page_size, max_running, context_length, CHUNK_TOKENS)
        self.weight_version = "0"
        self.tokens_generated = 0
        self.prompt_tokens_computed = 0
        self.metrics = RequestMetrics()
        self.capacity_tokens = num_pages * page_size
        self._seeds = random.Random(random_seed)
        self._min_rows = min_rows
        self._min_query_rows = QUERY_ROWS[model.dtype] if min_query_rows is None else min_query_rows
        self._plan: tuple[int, DecodeAttention] | None = None
        self._records_experts = record_experts and model.config.experts is not None

    # ---- requests

    def make_sequences(
        self, prompt: GenerateInput, prompt_ids: tuple[int, ...], on_update: Callable[[Sequence], None], stream: bool
    ) -> list[Sequence]:
        """The n samples of one prompt; raises BadRequest for what this engine could never do. Changes no state."""
        vocab, params = self.model.config.vocab_size, prompt.params
        if not all(0 <= token < vocab for token in prompt_ids):
            wrong = next(token for token in prompt_ids if not 0 <= token < vocab)
            raise BadRequest(f"input_ids contains {wrong}, but the vocabulary has {vocab} tokens")
        if prompt.return_routed_experts and not self._records_experts:
            has_none = self.model.config.experts is None
            reason = "the model has no experts" if has_none else "start the engine with --enable-return-routed-experts"
            raise BadRequest(f"return_routed_experts: {reason}")
        for name, ids in (("token_ids_logprob", prompt.token_ids_logprob), ("logit_bias", dict(params.logit_bias))):
            wrong_ids = [token for token in ids if not 0 <= token < vocab]
            if wrong_ids:
                raise BadRequest(f"{name} contains {wrong_ids[0]}, but the vocabulary has {vocab} tokens")
        room = max(min(self.scheduler.context_length, self.capacity_tokens) - len(prompt_ids), 0)
        max_new = room if params.max_new_tokens is None else params.max_new_tokens
        self.scheduler.check_fits(len(prompt_ids), max_new)
        stop_ids = frozenset() if params.ignore_eos else frozenset(params.stop_token_ids) | self.text.eos_token_ids
        seed = self._seeds.getrandbits(63) if params.sampling_seed is None else params.sampling_seed
        rids = [prompt.rid] if params.n == 1 else [f"{prompt.rid}{RID_SEPARATOR}{j}" for j in range(params.n)]
        return [
            Sequence(
                rid=rid,
                prompt_ids=prompt_ids,
                params=params,
                max_new_tokens=max_new,
                stop_ids=stop_ids,
                suppressed_ids=tuple(sorted(token for token in stop_ids if 0 <= token < vocab)),
                generator=random.Random(f"{seed}:{j}"),
                on_update=on_update,
                stream=stream,
                prompt_log_probs=asked_for(prompt, prompt_ids),
                return_routed_experts=prompt.return_routed_experts,
                changes=LogitChanges(params) if params.adjusts else None,
                alternatives=Alternatives(prompt.top_logprobs_num, prompt.token_ids_logprob)
                if prompt.return_logprob
                else Alternatives(),
            )
            for j, rid in enumerate(rids)
        ]

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues samples. Raises BadRequest if a request id is in use."""
        sequences = list(sequences)
        in_use = {sequence.rid for sequence in self.scheduler.in_engine()}
        for sequence in sequences:
            if sequence.rid in in_use:
                raise BadRequest(f"the request id {sequence.rid!r} is in use by a request that has not ended")
        for sequence in sequences:
            if sequence.max_new_tokens == 0 and sequence.prompt_log_probs is None:
                self._end(sequence, FinishReason("length", length=0))
            else:
                self.scheduler.add(sequence)

    def abort(self, rid: str | None, message: str = "aborted by request") -> int:
        """Ends the samples of one request (None: all), with the tokens they have. Returns how many there were."""
        prefix = f"{rid}{RID_SEPARATOR}"
        hit = [s for s in self.scheduler.in_engine() if rid is None or s.rid == rid or s.rid.startswith(prefix)]
        self.end_all(hit, message)
        return len(hit)

    def end_all(self, sequences: Iterable[Sequence], message: str) -> None:
        for sequence in sequences:
            if sequence.finish_reason is None:
                self.scheduler.release(sequence)
                self._end(sequence, aborted(message))

    def retract(self) -> None:
        self.scheduler.retract_all()

    def forget_prefixes(self) -> None:
        self.scheduler.forget_prefixes()

    def release_cache(self) -> None:
        """Gives the cache's memory back to the system. Nothing may be in the engine."""
        self._plan = None
        self.forget_prefixes()
        self._cache.give_back()

    # ---- steps

    @torch.inference_mode()
    def step(self) -> None:
        """Computes a piece of prefill if anything new fits, else one token of every running sample."""
        admitted = self.scheduler.admit()
        if admitted.chunks or admitted.joining:
            self._prefill(admitted.chunks, admitted.joining)
        elif self.scheduler.running:
            self._decode()

    def _prefill(self, chunks: list[tuple[Prefill, int]], joining: list[Sequence]) -> None:
        complete = self._compute_chunks(chunks) if chunks else []
        new: list[Sequence] = []
        for prefill in complete:
            self._hand_out_pages(prefill.prefix)
            self.scheduler.start_running(prefill)
            new += prefill.members
        for sequence in joining:
            self._join(sequence)
            self.scheduler.running.append(sequence)
            new.append(sequence)
        for sequence in new:
            sequence.experts = list(sequence.prefix.experts)
        drawing = [sequence for sequence in new if sequence.max_new_tokens]
        if drawing:
            self._emit(drawing, torch.stack([sequence.prefix.next_logits for sequence in drawing]))
        for sequence in new:
            if not sequence.max_new_tokens:
                self.scheduler.release(sequence)
                self._end(sequence, FinishReason("length", length=0))

    def _compute_chunks(self, chunks: list[tuple[Prefill, int]]) -> list[Prefill]:
        """Runs the model over the chunks; returns the prefills that are complete, with their `next_logits`."""
        page_size = self._cache.page_size
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[Chunk] = []
        last_rows: list[int] = []
        recorded: list[tuple[Sequence, int, int, int]] = []
        complete: list[Prefill] = []
        for prefill, length in chunks:
            start, end = prefill.done, prefill.done + length
            pages = prefill.prefix.pages
            while len(pages) * page_size < end:
                pages.append(self._pages.allocate())
            for member in prefill.members:
                if member.prompt_log_probs is not None:
                    recorded.append((member, len(tokens), len(tokens) + length, start))
            spans.append(Chunk(start, length, [page.index for page in pages[: -(-end // page_size)]]))
            tokens += prefill.token_ids[start:end]
            positions += range(start, end)
            prefill.done = end
            if end == len(prefill.token_ids):
                complete.append(prefill)
                last_rows.append(len(tokens) - 1)
        self.prompt_tokens_computed += len(tokens)
        attend = PrefillAttention(self.model.config, self._cache, spans)
        padded = self._at_least_min_rows(tokens, positions)
        chosen = self._room_for_experts(len(padded[0]))
        hidden = self.model.forward(*padded, attend, chosen)
        if chosen is not None:
            by_chunk = chosen[: len(tokens)].split([length for _, length in chunks])
            for (prefill, _), span, own in zip(chunks, spans, by_chunk, strict=True):
                # A prompt that begins anew still has the chunks from before.
                earlier = prefill.prefix.experts if span.start else []
                prefill.prefix.experts = [*earlier, own.numpy()]
        for sequence, low, high, start in recorded:
            record(self.model, sequence, hidden[low:high], start, self._min_rows)
        if complete:
            rows = last_rows + last_rows[:1] * (self._min_rows - len(last_rows))
            logits = self.model.logits(hidden[torch.tensor(rows)])
            for prefill, row in zip(complete, logits[: len(complete)], strict=True):
                prefill.prefix.next_logits = row.clone()
        return complete

    def _hand_out_pages(self, prefix: Prefix) -> None:
        """From the prompt's pages to its samples': one sample takes all, several share the full ones."""
        pages, prefix.pages = prefix.pages, []
        first, *others = prefix.members
        first.pages = pages
        first.num_computed = prefix.length
        for sequence in others:
            self._join(sequence)

    def _join(self, sequence: Sequence) -> None:
        """Gives a sample the prompt that another one has computed."""
        prefix = sequence.prefix
        other = next(member for member in prefix.members if member.num_computed)
        if len(prefix.pages) < prefix.num_full_pages:
            prefix.pages, other.pages = other.pages[: prefix.num_full_pages], other.pages[prefix.num_full_pages :]
            for page in prefix.pages:
                self._pages.share(page)
        filled = prefix.length % self._cache.page_size
        if filled:
            page = self._pages.allocate()
            self._cache.copy_page(other.pages[0].index, page.index)
            self._cache.clear_from(page.index, filled)
            sequence.pages.append(page)
        sequence.num_computed = prefix.length

    def _decode(self) -> None:
        running, page_size = self.scheduler.running, self._cache.page_size
        for sequence in running:
            if sequence.num_computed % page_size == 0:
                page = self._pages.allocate()
                self._cache.clear_from(page.index, 0)
                sequence.pages.append(page)
        attend = self._decode_plan()
        positions = [sequence.num_computed for sequence in running]
        attend.advance(torch.tensor(positions) % page_size)
        tokens = self._at_least_min_rows([sequence.output_ids[-1] for sequence in running], positions)
        chosen = self._room_for_experts(len(tokens[0]))
        logits = self.model.logits(self.model.forward(*tokens, attend, chosen))[: len(running)]
        for row, sequence in enumerate(running):
            sequence.num_computed += 1
            if chosen is not None:
                sequence.experts.append(chosen[row : row + 1].numpy())
        self._emit(list(running), logits)

    def _decode_plan(self) -> DecodeAttention:
        """The last step's plan as long as no page was added, moved or released since."""
        version = self._pages.layout_version
        if self._plan is None or self._plan[0] != version:
            rows: list[Row] = []
            groups: dict[Prefix, tuple[list[int], list[int]]] = {}
            places = {}
            for i, sequence in enumerate(self.scheduler.running):
                own, prefix = [page.index for page in sequence.pages], sequence.prefix
                if not prefix.pages:
                    rows.append(Row(own))
                    continue
                if prefix not in groups:
                    places[prefix] = len(groups)
                    groups[prefix] = [page.index for page in prefix.pages], []
                members = groups[prefix][1]
                rows.append(Row(own, places[prefix], len(members)))
                members.append(i)
            plan = DecodeAttention(
                self.model.config,
                self._cache,
                rows,
                list(groups.values()),
                len(self._pages.own),
                self._min_rows,
                self._min_query_rows,
            )
            self._plan = version, plan
        return self._plan[1]

    def _at_least_min_rows(self, tokens: list[int], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        missing = max(self._min_rows - len(tokens), 0)
        return torch.tensor(tokens + [0] * missing), torch.tensor(positions + [0] * missing)

    def _room_for_experts(self, rows: int) -> torch.Tensor | None:
        """int16 [rows, layers, experts a token], of zeros; None where nothing is recorded."""
        if not self._records_experts:
            return None
        config = self.model.config
        return torch.zeros(rows, config.num_layers, config.experts.num_chosen, dtype=torch.int16)

    # ---- tokens

    def _emit(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Draws the next token of each sample and ends those that are done."""
        tokens, log_probs = sample(logits, [_row_params(sequence) for sequence in sequences])
        self.tokens_generated += len(tokens)
        for row, (sequence, token, log_prob) in enumerate(zip(sequences, tokens, log_probs, strict=True)):
            if log_prob - log_prob != 0:  # NaN or infinite
                reason = aborted("the model's logits are not finite: its weights are broken")
            else:
                self.metrics.got_token(sequence)
                sequence.append(token, log_prob, self.weight_version)
                others = sequence.alternatives
                if others.wanted:
                    top, chosen = alternatives(logits[row], others.num_top, others.ids)
                    others.top.append(top)
                    others.chosen.append(chosen)
                reason = self._finish_reason(sequence, token)
            if reason:
                self.scheduler.release(sequence)
                self._end(sequence, reason)
            elif sequence.stream and len(sequence.output_ids) % sequence.params.stream_interval == 0:
                sequence.on_update(sequence)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """A stop token or string counts as such also where it comes as the last allowed token."""
        length = len(sequence.output_ids)
        if token in sequence.stop_ids:
            return FinishReason("stop", matched=token)
        if sequence.params.stop and length >= sequence.params.min_new_tokens:
            matched = self.text.find_stop(sequence.output_ids, sequence.params.stop)
            if matched is not None:
                return FinishReason("stop", matched=matched)
        return FinishReason("length", length=length) if length >= sequence.max_new_tokens else None

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.metrics.ended(sequence, reason)
        sequence.on_update(sequence)


def _row_params(sequence: Sequence) -> RowParams:
    params = sequence.params
    return RowParams(
        temperature=params.temperature,
        uniform=sequence.draw_uniform(),
        greedy=params.is_greedy,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        suppressed=sequence.suppressed_ids if len(sequence.output_ids) < params.min_new_tokens else (),
        changes=sequence.changes,
    )
