"""Attention over the paged cache: prompts in chunks, and one new token a sequence (decode).

Decode. Every page is attended to by itself (scores, softmax, weighted values), and the pages of a sequence are then
combined by the log-sum-exp of their scores. A page that the samples of one prompt share is read once, with the queries
of all of them as the rows of one matrix product. The products always have the same inner sizes, whoever else is in
the batch and whether or not a page is shared: so a sequence's result does not depend on its company, bit by bit
(given at least `min_query_rows` rows a product: below, MKL takes other kernels for float32).

Shapes: `B` sequences, `P` own pages, `U` shared pages, `Q` query heads, `K` key-value heads, `G` = Q / K, `D` and `E`
the dimensions of a key and of a value, `S` page_size, `R` query rows a page and head (G, padded), `M` members of the
largest sharing group, `W` = Q D + K D + K E, the width of q, k and v together.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from colloid.engines.embedded.kv_cache import KVCache
from colloid.engines.embedded.model_config import ModelConfig

# Below this many multiplications a bf16 product is not given to oneDNN but to a plain loop, which rounds differently.
MIN_PRODUCT = 16 * 16 * 16
# Kernels take the last columns of a matrix one by one, with another exponential and another order of additions: a
# multiple of this many columns has none of these.
COLUMNS = 64
QUERY_ROWS = {torch.float32: 4, torch.bfloat16: 1}


@dataclass(frozen=True)
class Row:
    """One sequence of a decode batch: its own pages' indices, its place in a sharing group (None: shares nothing)."""

    own: list[int]
    group: int | None = None
    member: int = 0


class DecodeAttention:
    """A plan for one decode step of B rows; `advance` moves it on while no page is added, moved or released."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        rows: SequenceOf[Row],
        groups: SequenceOf[tuple[list[int], list[int]]],
        num_own: int,
        min_rows: int,
        min_query_rows: int,
    ):
        """groups: (shared page indices in order, rows of the members), one a prompt; shared pages fill the cache's end.

        num_own: own pages in use, those of sequences that are not in this batch included.
        """
        self.config, self.cache = config, cache
        self.batch = len(rows)
        kv_heads, per_kv, size = config.num_kv_heads, config.queries_per_kv, cache.page_size
        self.query_rows = max(per_kv, min_query_rows)
        row_product = kv_heads * min(config.key_dim, config.value_dim) * size
        self.num_own = max(num_own, MIN_PRODUCT // (row_product * self.query_rows) + 1)
        self.num_shared = sum(len(pages) for pages, _ in groups)
        fewest = max(-(-min_query_rows // per_kv), MIN_PRODUCT // (row_product * per_kv) + 1)
        self.members = max([fewest, *(len(members) for _, members in groups)])
        self.own_scores = self.num_own * kv_heads * self.query_rows
        self._plan_buffers()
        self._plan_queries(rows, groups)
        self._plan_combination(rows, groups, max(min_rows, len(rows)))

    def _plan_buffers(self) -> None:
        """Scores and outputs of all pages, own ones first, and views of them and of each layer's cache."""
        kv_heads, size = self.config.num_kv_heads, self.cache.page_size
        key_dim, value_dim = self.config.key_dim, self.config.value_dim
        dtype = self.cache.keys.dtype
        shared_rows = self.members * self.config.queries_per_kv
        total = self.own_scores + self.num_shared * kv_heads * shared_rows
        self.scores = torch.empty(total, size, dtype=dtype)
        self.outputs = torch.empty(total, value_dim, dtype=dtype)
        self.mask = torch.zeros(self.num_own, kv_heads, 1, size, dtype=dtype)
        self.mask_rows = self.mask.view(-1, 1, size)
        self.no_mask = torch.zeros(1, 1, size, dtype=dtype)
        own, shared = slice(0, self.own_scores), slice(self.own_scores, total)
        self.own_score_rows = self.scores[own].view(-1, self.query_rows, size)
        self.own_output_rows = self.outputs[own].view(-1, self.query_rows, value_dim)
        self.shared_score_rows = self.scores[shared].view(-1, shared_rows, size)
        self.shared_output_rows = self.outputs[shared].view(-1, shared_rows, value_dim)
        self.first_shared = self.cache.keys.shape[1] - self.num_shared
        keys, values = self.cache.keys, self.cache.values
        self.own_keys = [k.view(-1, key_dim, size) for k in keys[:, : self.num_own].unbind()]
        self.own_values = [v.view(-1, size, value_dim) for v in values[:, : self.num_own].unbind()]
        self.shared_keys = [k.view(-1, key_dim, size) for k in keys[:, self.first_shared :].unbind()]
        self.shared_values = [v.view(-1, size, value_dim) for v in values[:, self.first_shared :].unbind()]

    def _plan_queries(self, rows: SequenceOf[Row], groups: SequenceOf[tuple[list[int], list[int]]]) -> None:
        owner = [0] * self.num_own
        for i, row in enumerate(rows):
            for page in row.own:
                owner[page] = i
        self.owner = torch.tensor(owner)
        self.last_page = torch.tensor([row.own[-1] for row in rows])
        group_of = [0] * self.num_shared
        member_rows = []
        for j, (pages, members) in enumerate(groups):
            for page in pages:
                group_of[page - self.first_shared] = j
            member_rows += members + [members[0]] * (self.members - len(members))
        self.member_rows = torch.tensor(member_rows)
        self.group_of = None if group_of == list(range(len(groups))) else torch.tensor(group_of)
        self.num_groups = len(groups)

    def _plan_combination(
        self, rows: SequenceOf[Row], groups: SequenceOf[tuple[list[int], list[int]]], num_rows: int
    ) -> None:
        """Where each sequence's partial results lie: indices into the rows of `scores`, page by page.

        `num_rows` - B rows of padding follow, which have no pages.
        """
        c = self.config
        kv_heads, per_kv = c.num_kv_heads, c.queries_per_kv
        shared_rows = self.members * per_kv
        bases: list[list[int]] = []
        strides: list[list[int]] = []
        for row in rows:
            shared = [] if row.group is None else groups[row.group][0]
            bases.append(
                [
                    self.own_scores + (p - self.first_shared) * kv_heads * shared_rows + row.member * per_kv
                    for p in shared
                ]
                + [p * kv_heads * self.query_rows for p in row.own]
            )
            strides.append([shared_rows] * len(shared) + [self.query_rows] * len(row.own))
        counts = torch.tensor([len(b) for b in bases])
        width, heads = int(counts.max()), kv_heads * per_kv
        self.is_single = width == 1 and num_rows == self.batch
        pad = [b + b[:1] * (width - len(b)) for b in bases], [s + s[:1] * (width - len(s)) for s in strides]
        base, stride = (torch.tensor(x)[:, None, None] for x in pad)
        index = base + torch.arange(kv_heads)[:, None, None] * stride + torch.arange(per_kv)[:, None]
        index = index.view(-1, width)  # [B K G, width]
        absent = torch.arange(width) >= counts.repeat_interleave(heads)[:, None]
        bag, page = (~absent).nonzero().unbind(1)
        self.flat_index = index[bag, page]
        columns = -(-len(index) // COLUMNS) * COLUMNS
        padding = (0, 0, 0, columns - len(index))
        self.by_page = F.pad(index, padding).t().flatten()  # [width, columns]: sums over pages add in order
        self.absent = F.pad(absent, padding).t().contiguous() if bool(absent.any()) else None
        self.width = width
        self.present = page * columns + bag
        per_bag = F.pad(counts.repeat_interleave(heads), (0, (num_rows - self.batch) * heads))
        self.bag_starts = per_bag.cumsum(0) - per_bag

    def advance(self, offsets: torch.Tensor) -> None:
        """offsets [B]: position within its last page that each sequence writes in this step; later ones are masked."""
        hidden = torch.arange(self.cache.page_size) > offsets[:, None]
        rows = torch.zeros(hidden.shape, dtype=self.mask.dtype).masked_fill_(hidden, float("-inf"))
        self.mask[self.last_page] = rows[:, None, None].expand(-1, self.config.num_kv_heads, 1, -1)
        self.offsets = offsets

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv [rows ≥ B, W], rotated -> [rows, Q E]; rows past B are padding."""
        c = self.config
        q, k, v = qkv[: self.batch].split(c.qkv_widths, 1)
        self.cache.write_tokens(
            layer,
            self.last_page,
            self.offsets,
            k.view(self.batch, c.num_kv_heads, c.key_dim),
            v.view(self.batch, c.num_kv_heads, c.value_dim),
        )
        self._score(layer, q.reshape(self.batch, c.num_kv_heads, c.queries_per_kv, c.key_dim))
        scores = self.scores.float()
        weights = torch.softmax(scores, -1)
        self._weigh_values(layer, weights.to(self.scores.dtype))
        if self.is_single:
            out = self.outputs.index_select(0, self.flat_index)
        else:
            out = self._combine(scores.amax(-1), weights.amax(-1))
        return out.to(qkv.dtype).view(len(qkv), c.num_heads * c.value_dim)

    def _score(self, layer: int, q: torch.Tensor) -> None:
        """Scores of all pages, from q [B, K, G, D]."""
        kv_heads, per_kv, dim = q.shape[1:]
        scale = self.config.attention_scale
        padded = F.pad(q, (0, 0, 0, self.query_rows - per_kv)) if self.query_rows > per_kv else q
        own = padded.index_select(0, self.owner).view(-1, self.query_rows, dim)
        torch.baddbmm(self.mask_rows, own, self.own_keys[layer], alpha=scale, out=self.own_score_rows)
        if self.num_shared:
            rows = q.index_select(0, self.member_rows).view(self.num_groups, self.members, kv_heads, per_kv, dim)
            rows = rows.transpose(1, 2).reshape(self.num_groups, kv_heads, -1, dim)
            if self.group_of is not None:
                rows = rows.index_select(0, self.group_of)
            rows = rows.view(self.num_shared * kv_heads, -1, dim)
            torch.baddbmm(self.no_mask, rows, self.shared_keys[layer], alpha=scale, out=self.shared_score_rows)

    def _weigh_values(self, layer: int, weights: torch.Tensor) -> None:
        own = weights[: self.own_scores].view(self.own_score_rows.shape)
        torch.bmm(own, self.own_values[layer], out=self.own_output_rows)
        if self.num_shared:
            shared = weights[self.own_scores :].view(self.shared_score_rows.shape)
            torch.bmm(shared, self.shared_values[layer], out=self.shared_output_rows)

    def _combine(self, largest_scores: torch.Tensor, largest_weights: torch.Tensor) -> torch.Tensor:
        """Sums the pages' outputs of each sequence and head, weighted by the share of each page: [B K G, E] float32.

        A page's share is proportional to the sum of the exponentials of its scores, exp(its largest score) / (its
        largest weight).
        """
        scores = largest_scores.index_select(0, self.by_page).view(self.width, -1)
        if self.absent is not None:
            scores.masked_fill_(self.absent, float("-inf"))
        shares = torch.softmax(scores, 0).div_(largest_weights.index_select(0, self.by_page).view(self.width, -1))
        shares = shares.div_(shares.sum(0)).flatten().index_select(0, self.present)
        return torch.embedding_bag(self.outputs.float(), self.flat_index, self.bag_starts, False, 0, False, shares)[0]


@dataclass(frozen=True)
class Chunk:
    """Part of a prompt: `length` tokens from position `start` (a multiple of the page size), and the pages so far."""

    start: int
    length: int
    pages: list[int]


class PrefillAttention:
    """Causal attention of packed chunks, each of one sequence: one kernel call a chunk, no padding."""

    def __init__(self, config: ModelConfig, cache: KVCache, chunks: SequenceOf[Chunk]):
        self.config, self.cache, self.chunks = config, cache, chunks
        size = cache.page_size
        self._pages = [torch.tensor(chunk.pages) for chunk in chunks]
        self._new = [p[chunk.start // size :] for p, chunk in zip(self._pages, chunks, strict=True)]
        self._masks = [_causal_mask(chunk, cache.keys.dtype) if chunk.start else None for chunk in chunks]

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv [T, W] -> [T, Q E]; rows past the chunks' tokens are padding."""
        c = self.config
        out = qkv.new_zeros(len(qkv), c.num_heads, c.value_dim)
        q, k, v = qkv.split(c.qkv_widths, 1)
        q, k = (x.view(len(qkv), -1, c.key_dim) for x in (q, k))
        v = v.view(len(qkv), -1, c.value_dim)
        width = max(c.key_dim, c.value_dim)
        start = 0
        for i, chunk in enumerate(self.chunks):
            rows = slice(start, start + chunk.length)
            self.cache.write_prompt(layer, self._new[i], k[rows], v[rows])
            keys, values = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
            if chunk.start:
                before = self._pages[i][: chunk.start // self.cache.page_size]
                earlier = self.cache.read(layer, before)
                keys, values = (torch.cat(pair, 1) for pair in zip(earlier, (keys, values), strict=True))
            attended = F.scaled_dot_product_attention(
                _widened(q[rows].transpose(0, 1)[None], width),
                _widened(keys[None], width),
                _widened(values[None], width),
                attn_mask=self._masks[i],
                is_causal=self._masks[i] is None,
                scale=c.attention_scale,
                enable_gqa=True,
            )
            out[rows] = attended[0, ..., : c.value_dim].transpose(0, 1)
            start += chunk.length
        return out.view(len(qkv), -1)


def _widened(heads: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros behind the last dimension up to `width`: the fast kernel wants keys and values of one width (MLA)."""
    return heads if heads.shape[-1] == width else F.pad(heads, (0, width - heads.shape[-1]))


def _causal_mask(chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    position = torch.arange(chunk.start + chunk.length)
    hidden = position > torch.arange(chunk.start, chunk.start + chunk.length)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
