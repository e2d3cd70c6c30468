"""Where prompts come from, and where what was not trained goes back to.

    dataset ──► get_samples ──► in flight ──► trained (`mark_consumed`)
                    ▲                │
                    └── returned ◄───┘ add_samples: surplus and aborted groups (with a buffer)

Invariants, over any interleaving of get, add, save and load:
1. `get_samples(n)` returns exactly n groups, over as many epochs as that takes.
2. Every prompt of an epoch is handed out once. What a checkpoint finds in flight is handed out again after the
   resume, first and in the same order: no prompt is skipped, and none comes twice.
3. The order of epoch e follows from seed + e alone.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from colloid.config.sft import takes_conversations
from colloid.data.prompts import PromptDataset, PromptFormat, load_prompts, load_tokenizer
from colloid.data.sample import Sample, Status
from colloid.data.sft import end_token_ids, load_conversations
from colloid.errors import CheckpointError, HookError

logger = logging.getLogger(__name__)

STATE_FILE = "data_source.json"
Group = list[Sample]


class RolloutDataSource:
    """Hands out groups of `args.n_samples_per_prompt` samples, one group a prompt; takes nothing back.

    A subclass need not call this constructor: what is missing then has defaults.

    Args:
        args: the run's options; `prompt_data`, `hf_checkpoint`, `rollout_seed`, `rollout_shuffle` and the keys.
        dataset: the prompts; None: loaded from `args.prompt_data`.
    """

    args: Any = None
    dataset: PromptDataset | None = None
    checkpoint_dir: str | None = None
    """Where `save` and `load` find their file; set by the framework before it calls them."""
    rollout_id: int | None = None
    """The rollout that asks; set by the framework."""
    keeps_samples = False
    """Whether `add_samples` keeps what it is given."""
    offset = 0
    """Prompts of this epoch that were handed out."""
    epoch = 0
    group_index = 0
    sample_index = 0

    def __new__(cls, *args, **kwargs):
        source = super().__new__(cls)
        source.metadata = {}
        source._returned = []
        source._in_flight = {}
        source._order = None
        return source

    def __init__(self, args, dataset: PromptDataset | None = None):
        self.args = args
        self.dataset = load_dataset(args) if dataset is None else dataset

    def __len__(self) -> int:
        """Prompts of one epoch; 0 where a subclass has no such thing."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else 0

    def get_samples(self, num_samples: int) -> list[Group]:
        """Exactly `num_samples` groups."""
        groups = self._returned[:num_samples]
        del self._returned[:num_samples]
        groups += [self._next_group() for _ in range(num_samples - len(groups))]
        self._track(groups)
        return groups

    def add_samples(self, groups: list[Group]) -> None:
        """Called after each rollout with the groups that were not trained. This class keeps none of them."""
        self.mark_consumed(groups)

    def mark_consumed(self, groups: list[Group]) -> None:
        """These groups (as handed out) need not be handed out again: they were trained, filtered, or given back."""
        for group in groups:
            if group:
                self._in_flight.pop(flatten(group)[0].group_index, None)

    def state_dict(self) -> dict[str, Any]:
        """Plain data: position, and what is in flight."""
        return {
            "offset": self.offset,
            "epoch": self.epoch,
            "group_index": self.group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
            "fingerprint": getattr(self.dataset, "fingerprint", None),
            "returned": [_to_dicts(group) for group in self._returned],
            "in_flight": [_to_dicts(_unfinished_reset(group)) for group in self._in_flight.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; what was in flight is handed out first."""
        self.offset, self.epoch = int(state["offset"]), int(state["epoch"])
        self.group_index, self.sample_index = int(state["group_index"]), int(state["sample_index"])
        self.metadata = state.get("metadata") or {}
        self._returned = [_from_dicts(group) for group in [*state["in_flight"], *state["returned"]]]
        self._in_flight = {}
        fingerprint = getattr(self.dataset, "fingerprint", None)
        if state["fingerprint"] != fingerprint:
            logger.warning(
                "%s is not the data that the checkpoint was made with (%s then, %s now): the run goes on at prompt %d "
                "of epoch %d of the new data",
                *(getattr(self.dataset, "path", "the data source"), state["fingerprint"], fingerprint),
                *(self.offset, self.epoch),
            )

    def save(self, rollout_id: int) -> None:
        """Writes the state to `checkpoint_dir`."""
        try:
            data = orjson.dumps(self.state_dict(), option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise CheckpointError(
                f"the data source of rollout {rollout_id} cannot be saved: a waiting sample (its metadata, label or "
                f"reward) or the source's metadata holds what JSON cannot: {error}"
            ) from error
        Path(self.checkpoint_dir or ".", STATE_FILE).write_bytes(data)

    def load(self, rollout_id: int | None = None) -> None:
        """Reads the state from `checkpoint_dir`."""
        path = Path(self.checkpoint_dir or ".", STATE_FILE)
        if not path.exists():
            raise CheckpointError(f"the checkpoint of rollout {rollout_id} has no data source state: {path}")
        self.load_state_dict(orjson.loads(path.read_bytes()))

    def _track(self, groups: list[Group]) -> None:
        self._in_flight.update({group[0].group_index: group for group in groups})

    def _next_group(self) -> Group:
        if not len(self):
            raise HookError(f"{type(self).__name__} has no data set: override get_samples, or call super().__init__")
        while self.offset >= len(self.dataset):
            self.offset -= len(self.dataset)
            self.epoch += 1
        row = self.dataset.rows[self._row_at(self.offset)]
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = Sample(
                group_index=self.group_index,
                index=self.sample_index,
                prompt=copy.deepcopy(row.prompt),
                tokens=row.token_ids.tolist(),
                label=copy.deepcopy(row.label),
                metadata=copy.deepcopy(row.metadata),
            )
            self.sample_index += 1
            group.append(sample)
        self.offset += 1
        self.group_index += 1
        return group

    def _row_at(self, position: int) -> int:
        if not self.args.rollout_shuffle:
            return position
        if self._order is None or self._order[0] != self.epoch:
            generator = np.random.default_rng(self.args.rollout_seed + self.epoch)
            self._order = self.epoch, generator.permutation(len(self.dataset))
        return int(self._order[1][position])


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Keeps what was not trained, and hands it out first.

    Args:
        buffer_filter: `(rollout_id, buffer, num_samples) -> groups`, bound to `args` already; None: the method.
    """

    keeps_samples = True

    def __new__(cls, *args, **kwargs):
        source = super().__new__(cls)
        source.buffer = []
        source._buffer_filter_hook = None
        return source

    def __init__(self, args, dataset: PromptDataset | None = None, buffer_filter=None):
        super().__init__(args, dataset)
        self._buffer_filter_hook = buffer_filter if buffer_filter is not None else _buffer_filter_of(args)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Exactly `num_samples` groups: what a checkpoint found in flight, then the buffer, then the data set."""
        waiting = self._returned[:num_samples]
        del self._returned[:num_samples]
        buffered = self._take_from_buffer(num_samples - len(waiting))
        groups = waiting + buffered
        self._track(groups)
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, groups: list[Group]) -> None:
        """Keeps the groups; finished ones as they were recorded, others as bare prompts."""
        groups = [group for group in groups if group]
        self.mark_consumed(groups)
        for group in groups:
            reset_unfinished(group)
        self.buffer.extend(groups)

    def buffer_filter(self, args, buffer: list[Group], num_samples: int) -> list[Group]:
        """The groups of `buffer` to use now, at most `num_samples`. Default: the oldest."""
        return buffer[:num_samples]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": [_to_dicts(group) for group in self.buffer]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer = [_from_dicts(group) for group in state.get("buffer", [])]

    def _take_from_buffer(self, num_samples: int) -> list[Group]:
        if not self.buffer or not num_samples:
            return []
        held = list(self.buffer)
        if self._buffer_filter_hook is not None:
            name = f"--buffer-filter-path {getattr(self._buffer_filter_hook, 'path', '')}".strip()
            chosen = self._buffer_filter_hook(self.rollout_id, list(held), num_samples)
        else:
            name = f"{type(self).__name__}.buffer_filter"
            chosen = self.buffer_filter(self.args, list(held), num_samples)
        chosen = list(chosen or [])
        ids = {id(group) for group in chosen}
        if len(chosen) > num_samples or len(ids) != len(chosen):
            raise HookError(f"{name} returned {len(chosen)} groups ({len(ids)} different), asked for {num_samples}")
        if ids - {id(group) for group in held}:
            raise HookError(f"{name} returned groups that are not in the buffer: return the buffer's own lists")
        self.buffer = [group for group in held if id(group) not in ids]
        return chosen


def load_dataset(args) -> PromptDataset:
    """The training prompts that `args` name; conversations, where these are what is trained."""
    if takes_conversations(args):
        end_ids = end_token_ids(args.hf_checkpoint, args.hf_config)
        return load_conversations(
            args.prompt_data, load_tokenizer(args.hf_checkpoint), conversation_format(args), end_ids
        )
    return load_prompts(args.prompt_data, load_tokenizer(args.hf_checkpoint), prompt_format(args))


def prompt_format(args) -> PromptFormat:
    """The format of training prompts."""
    return PromptFormat(
        input_key=args.input_key,
        label_key=args.label_key,
        require_label="label_key" in args.given,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        apply_chat_template=args.apply_chat_template,
        chat_template_kwargs=args.apply_chat_template_kwargs or {},
        max_tokens=max_prompt_tokens(args),
    )


def conversation_format(args) -> PromptFormat:
    """The format of conversations to train on."""
    return replace(prompt_format(args), max_tokens=context_length(args))


def max_prompt_tokens(args) -> int | None:
    """The longest prompt that is used: `--rollout-max-prompt-len`, or what the context leaves beside the response."""
    limits = [args.rollout_max_prompt_len] if args.rollout_max_prompt_len else []
    context = context_length(args)
    if context:
        room = context - args.rollout_max_response_len
        limits.append(room if room > 0 else context - 1)
    return min(limits, default=None)


def context_length(args) -> int | None:
    """Tokens of prompt and response together: the smallest of what options and model say."""
    config = args.hf_config or {}
    model = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    given = [args.rollout_max_context_len, getattr(args, "sglang_context_length", None), model]
    return min((int(value) for value in given if value), default=None)


def _buffer_filter_of(args):
    if not getattr(args, "buffer_filter_path", None):
        return None
    from colloid.hooks import bind, load_hook

    return bind(load_hook(args.buffer_filter_path, "buffer_filter"), args)


def flatten(group: list) -> list[Sample]:
    """The samples of a group whose elements may be lists (one rollout in several parts)."""
    return [sample for item in group for sample in (item if isinstance(item, list) else [item])]


def is_finished(group: Group) -> bool:
    """Whether a group can be trained as it is: generated to the end and graded, or failed."""
    done = (Status.COMPLETED, Status.TRUNCATED)
    return all(s.status is Status.FAILED or (s.status in done and s.reward is not None) for s in flatten(group))


def reset_unfinished(group: Group) -> None:
    """Makes an unfinished group bare prompts again, whole: redoing only its long samples would favour short ones."""
    if not is_finished(group):
        for sample in flatten(group):
            sample.reset_response()


def _unfinished_reset(group: Group) -> Group:
    if is_finished(group):
        return group
    group = copy.deepcopy(group)
    reset_unfinished(group)
    return group


def _to_dicts(group: Group) -> list[dict[str, Any]]:
    return [sample.to_dict() for sample in flatten(group)]


def _from_dicts(group: list[dict[str, Any]]) -> Group:
    return [Sample.from_dict(data) for data in group]
