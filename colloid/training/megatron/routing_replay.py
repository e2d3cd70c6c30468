"""Routers that take the experts which were chosen before: by the policy in an earlier pass, or by the engine.

Only the choice is replayed. The weights of the chosen experts are those of the current router, so it has gradients.

    follow(experts)  every router takes the experts that are known of a token, and chooses itself where none are
    note(tokens)     every router chooses itself, and the choices are kept

In both a router that is called again in the backward (activation recompute) takes what it took in the forward. A call
outside of a forward is such a call; schedules run the backwards of a chunk's micro-batches in the order of their
forwards, so each router goes through a queue.

`T` tokens of a rank's batch, `K` layers of experts on this rank, `C` experts chosen a token, `t` tokens of a
micro-batch on this rank (under sequence parallelism, its part of them).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from colloid.training.megatron.moe import routers
from colloid.training.micro_batch import MicroBatch

UNKNOWN = -1


class RoutingReplay:
    """The routers of this rank. Outside of a pass they choose as always.

    Args:
        chunks: the model's, one a virtual pipeline stage.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self.active: RoutedPass | None = None
        found = [router for chunk in chunks for _, router in routers(chunk)]
        self._layers = [router.layer_number - 1 for router in found]
        self._num_chosen = found[0].topk if found else 0
        self._splits = bool(found) and bool(found[0].config.sequence_parallel)
        for column, router in enumerate(found):
            # Megatron's own keeps one target for all micro-batches and knows no token without one.
            router.router_replay = _Choice(self, column)

    def follow(self, experts: np.ndarray) -> RoutedPass:
        """
        Args:
            experts: int16 [T, layers of the whole model, C]; -1 where they are not known.
        """
        return RoutedPass(self, torch.from_numpy(experts[:, self._layers]), self._splits, notes=False)

    def note(self, num_tokens: int) -> RoutedPass:
        """
        Args:
            num_tokens: T.
        """
        room = torch.full((num_tokens, len(self._layers), self._num_chosen), UNKNOWN, dtype=torch.int16)
        return RoutedPass(self, room, self._splits, notes=True)

    def again(self, noted: RoutedPass) -> RoutedPass:
        """A pass that follows what another one, which is over, has noted. Collective."""
        return RoutedPass(self, noted.known(), self._splits, notes=False)


class RoutedPass:
    """A pass over micro-batches of one rank's batch; a context in which the model is called."""

    def __init__(self, replay: RoutingReplay, experts: torch.Tensor, splits: bool, *, notes: bool):
        self._replay, self._experts, self._splits = replay, experts, splits
        self.notes = notes
        self._current: torch.Tensor | None = None
        self._micro_batch: MicroBatch | None = None
        self._again: tuple[MicroBatch, torch.Tensor] | None = None
        self._queues: dict[int, deque[MicroBatch]] = {}

    def __enter__(self) -> RoutedPass:
        assert self._replay.active is None, "one pass at a time"
        self._replay.active = self
        self._queues.clear()
        return self

    def __exit__(self, *_: Any) -> None:
        self._replay.active, self._again = None, None
        self._queues.clear()

    @contextmanager
    def forward_of(self, micro_batch: MicroBatch) -> Iterator[None]:
        """While it is open the routers see this micro-batch's tokens for the first time."""
        self._micro_batch, self._current = micro_batch, self._of(micro_batch)
        try:
            yield
            if self.notes:
                rows = self._rows(micro_batch)
                self._experts[rows[rows >= 0]] = self._current[rows >= 0].cpu()
        finally:
            self._micro_batch, self._current = None, None

    def choose(self, column: int, own: torch.Tensor) -> torch.Tensor:
        """
        Args:
            column: of the router.
            own: int64 [t, C], what it would choose.

        Returns:
            int64 [t, C], what it is to take.
        """
        queue = self._queues.setdefault(column, deque())
        if self._micro_batch is not None:
            queue.append(self._micro_batch)
            known = self._current[:, column]
            if self.notes:
                known.copy_(own)
                return own
        else:
            known = self._once_more(queue.popleft())[:, column]
        return torch.where(known < 0, own, known.to(own.dtype))

    def known(self) -> torch.Tensor:
        """int16 [T, K, C]: the experts, those that other ranks have noted of the same samples included. Collective."""
        groups = [parallel_state.get_context_parallel_group()]
        if self._splits:
            groups.append(parallel_state.get_tensor_model_parallel_group())
        groups = [group for group in groups if group.size() > 1]
        if not self.notes or not groups:
            return self._experts
        everywhere = self._experts.to(torch.int32)
        for group in groups:
            dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=group)
        return everywhere.to(torch.int16)

    def _once_more(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Of the last micro-batch whose layers are recomputed, kept until the next one."""
        if self._again is None or self._again[0] is not micro_batch:
            self._again = micro_batch, self._of(micro_batch)
        return self._again[1]

    def _of(self, micro_batch: MicroBatch) -> torch.Tensor:
        """int16 [t, K, C], on the device; -1 where a token's experts are not known, and at padding."""
        rows = self._rows(micro_batch)
        experts = self._experts[rows.clamp(min=0)]
        experts[rows < 0] = UNKNOWN
        return experts.to(micro_batch.tokens.device)

    def _rows(self, micro_batch: MicroBatch) -> torch.Tensor:
        """int64 [t]: rows of the T tokens; -1 for padding."""
        rows = micro_batch.token_index
        if not self._splits:
            return rows
        group = parallel_state.get_tensor_model_parallel_group()
        return rows.chunk(group.size())[group.rank()]


class RolloutRouting:
    """What the passes over one rollout's batch do about experts.

    Args:
        replay: None: nothing.
        num_tokens: of the batch.
        experts: as the engine chose them, see `RoutingReplay.follow`; None: those of the log-probs that are computed
            before the first step. A step that needs none computed beforehand is that pass itself: its forward notes,
            and its recompute follows.
    """

    def __init__(self, replay: RoutingReplay | None, num_tokens: int = 0, experts: np.ndarray | None = None):
        self._replay = replay
        self._pass: RoutedPass | None = None
        if replay is not None:
            self._pass = replay.note(num_tokens) if experts is None else replay.follow(experts)
        self._known: RoutedPass | None = None
        self._before: set[int] = set()

    def before(self, index: int) -> RoutedPass | None:
        """Of the policy's log-probs before the first step, of the samples of a step."""
        self._before.add(index)
        return self._pass

    def training(self, index: int) -> RoutedPass | None:
        """Of a step's forward and backward. Collective, the first time."""
        if self._pass is None or not self._pass.notes or index not in self._before:
            return self._pass
        if self._known is None:
            self._known = self._replay.again(self._pass)
        return self._known


class _Choice:
    """What Megatron's `topk_routing_with_score_function` asks in place of its own choice."""

    def __init__(self, replay: RoutingReplay, column: int):
        self._replay, self._column = replay, column

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [t, experts] -> (scores of the chosen experts [t, C], their numbers)."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        active = self._replay.active
        if active is None:
            return values, own
        chosen = active.choose(self._column, own)
        return (values, own) if chosen is own else (scores.gather(1, chosen), chosen)
