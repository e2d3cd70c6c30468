"""Where prompts come from, and where what was not trained goes back to.

    dataset ──► get_samples ──► in flight ──► trained (`mark_consumed`)
                    ▲                │
                    └── returned ◄───┘ add_samples: surplus and aborted groups (with a buffer)

Invariants, over any interleaving of get, add, save and load:
1. `get_samples(n)` returns exactly n groups, over as many epochs as that takes.
2. Every prompt of an epoch is handed out once. What a checkpoint finds in flight is handed out again after the
   resume, first and in the same order: no prompt is skipped, and none comes twice.
3. The order of epoch e follows from seed + e alone.
4. With `--partial-rollout` a sample that was stopped half way is kept, saved and handed out with what it recorded.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from colloid.data.groups import (
    Group,
    copy_group,
    copy_sample,
    flatten,
    from_dicts,
    has_ended,
    is_finished,
    is_partial,
    reset_unfinished,
    to_dicts,
)
from colloid.data.mixture import Mixture
from colloid.data.opening import load_dataset
from colloid.data.rows import PromptDataset, PromptRow
from colloid.data.sample import Sample
from colloid.data.stream import PromptStream
from colloid.errors import CheckpointError, HookError

logger = logging.getLogger(__name__)

STATE_FILE = "data_source.json"


class RolloutDataSource:
    """Hands out groups of `args.n_samples_per_prompt` samples, one group a prompt; takes nothing back.

    A subclass need not call this constructor: what is missing then has defaults.

    Args:
        args: the run's options; `prompt_data`, `hf_checkpoint`, `rollout_seed`, `rollout_shuffle` and the keys.
        dataset: the prompts; None: loaded from `args.prompt_data`. With `--disable-rollout-global-dataset` there are
            none: samples are handed out empty, for the rollout or generate function to fill.
    """

    args: Any = None
    dataset: PromptDataset | PromptStream | Mixture | None = None
    checkpoint_dir: str | None = None
    """Where `save` and `load` find their file; set by the framework before it calls them."""
    rollout_id: int | None = None
    """The rollout that asks; set by the framework."""
    keeps_samples = False
    """Whether `add_samples` keeps what it is given."""
    saves_running = False
    """Whether running samples stand still, so that `state_dict` may take what they have; set by the framework."""
    offset = 0
    """Prompts of this epoch that were handed out; of all epochs, where they are streamed or weighted."""
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
        if dataset is None and getattr(args, "rollout_global_dataset", True):
            dataset = load_dataset(args)
        self.dataset = dataset

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

    def hand_out_again(self, groups: list[Group]) -> None:
        """These groups are the next to be handed out, as they are."""
        self._returned[:0] = groups

    def state_dict(self) -> dict[str, Any]:
        """Plain data: position, and what is in flight."""
        return {
            "offset": self.offset,
            "epoch": self.epoch,
            "group_index": self.group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
            "fingerprint": getattr(self.dataset, "fingerprint", None),
            "dataset": self.dataset.state() if isinstance(self.dataset, (PromptStream, Mixture)) else None,
            "drawn": self.dataset.drawn[0] if isinstance(self.dataset, PromptDataset) else None,
            "returned": [to_dicts(group) for group in self._returned],
            "in_flight": [
                to_dicts(group if is_finished(group) else self._as_it_stands(group, taken))
                for group, taken in self._in_flight.values()
            ],
        }

    def _as_it_stands(self, group: Group, taken: Group) -> Group:
        """A running group: each sample with what it has by now, or as it was `taken` where that may be half written."""
        samples = flatten(group)
        if not self.saves_running or len(samples) != len(taken) or any(one.generate_function_path for one in taken):
            return taken
        pairs = zip(samples, taken, strict=True)
        return [sample if has_ended(sample) or is_partial(sample) else before for sample, before in pairs]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; what was in flight is handed out first."""
        self.offset, self.epoch = int(state["offset"]), int(state["epoch"])
        self.group_index, self.sample_index = int(state["group_index"]), int(state["sample_index"])
        self.metadata = state.get("metadata") or {}
        if isinstance(self.dataset, PromptDataset):
            self.dataset.drawn[0] = state.get("drawn") or 0
        self._returned = self._loaded([*state["in_flight"], *state["returned"]])
        self._in_flight = {}
        if isinstance(self.dataset, (PromptStream, Mixture)):
            if state.get("dataset") is None:
                raise CheckpointError(
                    "the checkpoint's data was in memory, and now it is streamed or weighted: go on with the options "
                    "of the run that made it (--streaming-data, --prompt-data-weights)"
                )
            self.dataset.load_state(state["dataset"])
        elif state.get("dataset") is not None:
            raise CheckpointError(
                "the checkpoint's data was streamed or weighted: go on with the options of the run that made it "
                "(--streaming-data, --prompt-data-weights)"
            )
        fingerprint = getattr(self.dataset, "fingerprint", None)
        if state["fingerprint"] != fingerprint:
            logger.warning(
                "%s is not the data that the checkpoint was made with (%s then, %s now): the run goes on at prompt %d "
                "of epoch %d of the new data",
                *(getattr(self.dataset, "path", "the data source"), state["fingerprint"], fingerprint),
                *(self.offset, self.epoch),
            )

    def _loaded(self, groups: list[list[dict[str, Any]]]) -> list[Group]:
        """Groups of a checkpoint. Unfinished ones start anew where it had `--partial-rollout`, and this run has not."""
        loaded = [from_dicts(group) for group in groups]
        if not getattr(self.args, "partial_rollout", False):
            for group in loaded:
                reset_unfinished(group)
        return loaded

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
        """Keeps in mind what is handed out, and as what: an unfinished group is handed out so again after a resume."""
        self._in_flight.update({group[0].group_index: (group, copy_group(group)) for group in groups})

    def _next_group(self) -> Group:
        if self.dataset is None and not getattr(self.args, "rollout_global_dataset", True):
            return self._group_of(Sample())
        return self._group_of(_sample_of(self._next_row()))

    def _next_row(self) -> PromptRow:
        if isinstance(self.dataset, (PromptStream, Mixture)):
            row = self.dataset.next_row()
            self.epoch = self.dataset.epoch
        elif not len(self):
            raise HookError(f"{type(self).__name__} has no data set: override get_samples, or call super().__init__")
        else:
            while self.offset >= len(self.dataset):
                self.offset -= len(self.dataset)
                self.epoch += 1
            row = self.dataset.rows[self._row_at(self.offset)]
        self.offset += 1
        return row

    def complete(self, items: list[Any]) -> list[Any]:
        """What a subclass's `get_samples` returned, as numbered groups.

        A single Sample, and a row of the data set, is a prompt of which a group is made. Numbers that are given stay.
        """
        groups = []
        for item in items:
            if isinstance(item, PromptRow):
                item = _sample_of(item)
            if isinstance(item, Sample):
                item = self._group_of(item)
            elif isinstance(item, list) and item and all(isinstance(sample, Sample) for sample in item):
                self._number(item)
            groups.append(item)
        return groups

    def _group_of(self, prompt: Sample) -> Group:
        """A group of `args.n_samples_per_prompt` copies of `prompt`."""
        group = [copy_sample(prompt) for _ in range(self.args.n_samples_per_prompt)]
        self._number(group)
        return group

    def _number(self, group: Group) -> None:
        if all(sample.group_index is None for sample in group):
            for sample in group:
                sample.group_index = self.group_index
            self.group_index += 1
        for sample in group:
            if sample.index is None:
                sample.index = self.sample_index
                self.sample_index += 1

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
        self._buffer_filter_hook = buffer_filter

    def get_samples(self, num_samples: int) -> list[Group]:
        """Exactly `num_samples` groups: what a checkpoint found in flight, then the buffer, then the data set."""
        waiting = self._returned[:num_samples]
        del self._returned[:num_samples]
        buffered = self._take_from_buffer(num_samples - len(waiting))
        groups = waiting + buffered
        self._track(groups)
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, groups: list[Group]) -> None:
        """Keeps the groups; finished ones as they were recorded, others as bare prompts.

        With `args.partial_rollout` unfinished ones too are kept as they were recorded, to go on.
        """
        groups = [group for group in groups if group]
        self.mark_consumed(groups)
        if not getattr(self.args, "partial_rollout", False):
            for group in groups:
                reset_unfinished(group)
        self.buffer.extend(groups)

    def load_buffer_filter(self, args) -> None:
        """Takes the function of `args.buffer_filter_path`, where there is one."""
        if getattr(args, "buffer_filter_path", None):
            from colloid.hooks import bind, load_hook

            self._buffer_filter_hook = bind(load_hook(args.buffer_filter_path, "buffer_filter"), args)

    def buffer_filter(self, args, buffer: list[Group], num_samples: int) -> list[Group]:
        """The groups of `buffer` to use now, at most `num_samples`. Default: the oldest."""
        return buffer[:num_samples]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": [to_dicts(group) for group in self.buffer]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer = self._loaded(state.get("buffer", []))

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


def _sample_of(row: PromptRow) -> Sample:
    return Sample(
        prompt=copy.deepcopy(row.prompt),
        tokens=row.token_ids.tolist(),
        label=copy.deepcopy(row.label),
        metadata=copy.deepcopy(row.metadata),
    )
