"""The weights as named Hugging Face tensors, from any layout of the ranks, one round of bounded size at a time.

A plan is made once: what each rank holds is announced (names and shapes), every Megatron parameter that is exported
gets the ranks that its shards come from, and the parameters are dealt into rounds in the order of the name table. In a
round each rank that holds shards sends them to the receiving rank in one message; the receiver joins them, one
parameter at a time. So tensor, pipeline and expert parallelism are the same thing here, copies (data and context
parallelism, a tied head) send nothing, and no rank ever holds more than a round besides its own shards.

Weight sync, checksums and the export to a directory all read this one generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from colloid.errors import ConfigError
from colloid.weights.buckets import ALIGNMENT
from colloid.weights.hf_loader import NamedParameters, some
from colloid.weights.names import NameMap, Shard
from colloid.weights.shards import WHOLE, Coordinates


@dataclass(frozen=True)
class Piece:
    """A shard of a parameter, and the rank that sends it."""

    rank: int
    name: str
    """Megatron's, with layer and expert counted over the whole model."""
    index: int
    """Which shard."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Item:
    """A parameter that is exported, and its shards in order."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def announce(rank: int, parameters: NamedParameters, names: NameMap, coordinates: Coordinates) -> list[Piece]:
    """What this rank has to offer: its shards of exported parameters, unless they are copies."""
    pieces = []
    for name, parameter in parameters:
        entry = names[name].entry
        index = 0 if entry.shard is Shard.REPLICATED else coordinates.shard(name)[0]
        if entry.exported and not coordinates.holds_copy(name):
            pieces.append(Piece(rank, name, index, tuple(parameter.shape), parameter.dtype))
    return pieces


def make_plan(
    announced: Iterable[Piece], names: NameMap, coordinates: Coordinates, max_bytes: int
) -> list[tuple[Item, ...]]:
    """Deals the parameters into rounds of at most `max_bytes` (a larger parameter has one of its own).

    A pure function of what was announced, so that all ranks make the same plan. Where several ranks hold the same shard
    the first sends it. The order is that of the name table.

    Raises:
        ConfigError: no rank holds some of the tensors, or some of their shards. Names them.
    """
    shards: dict[str, dict[int, Piece]] = {}
    for piece in sorted(announced, key=lambda piece: piece.rank):
        shards.setdefault(piece.name, {}).setdefault(piece.index, piece)
    order = {name: row for row, name in enumerate(names.hf_names)}
    items = []
    incomplete, missing = [], set(order)
    for name, found in sorted(shards.items(), key=lambda item: order[names[item[0]].hf_names[0]]):
        wanted = 1 if names[name].entry.shard is Shard.REPLICATED else coordinates.shard(name)[1]
        if sorted(found) != list(range(wanted)):
            incomplete.append(f"{name} (shards {sorted(found)} of {wanted})")
        missing -= set(names[name].hf_names)
        items.append(Item(name, tuple(found[index] for index in sorted(found))))
    if missing or incomplete:
        raise ConfigError(f"the ranks do not hold the whole model: no rank has {some(incomplete + sorted(missing))}")
    rounds: list[list[Item]] = []
    size = 0
    for item in items:
        if not rounds or size + item.nbytes > max_bytes:
            rounds.append([])
            size = 0
        rounds[-1].append(item)
        size += item.nbytes
    return [tuple(items) for items in rounds]


class Exporter:
    """Yields (Hugging Face name, whole tensor) of the model on the receiving rank, and nothing on the others.

    Making one is collective over all ranks, and so is each pass: every rank has to exhaust the iterator. The tensors
    may be views of parameters, or of what was received in a round.

    Args:
        max_bytes: of a round.
        receiver: the rank that gets the tensors.
        read: the values of a parameter, called as it is needed: where they are somewhere else than in the parameter,
            one round at most is in memory.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        names: NameMap,
        coordinates: Coordinates = WHOLE,
        *,
        max_bytes: int,
        receiver: int = 0,
        read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ):
        self._parameters, self._read = dict(parameters), read
        self._names = names
        self._receiver = receiver
        world = dist.is_initialized() and dist.get_world_size() > 1
        self._rank = dist.get_rank() if world else receiver
        announced = [announce(self._rank, parameters, names, coordinates)]
        if world:
            announced = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(announced, announce(self._rank, parameters, names, coordinates))
        self.rounds = make_plan((piece for pieces in announced for piece in pieces), names, coordinates, max_bytes)

    @torch.no_grad()
    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One pass over the model."""
        for items in self.rounds:
            if self._rank != self._receiver:
                self._send(items)
                continue
            received = self._receive(items)
            for item in items:
                parts = [
                    self._read(self._parameters[piece.name])
                    if piece.rank == self._rank
                    else received.pop((item.name, piece.index))
                    for piece in item.pieces
                ]
                mapped = self._names[item.name]
                yield from mapped.to_hf(mapped.entry.shard.join(parts))
                del parts

    def _send(self, items: Sequence[Item]) -> None:
        pieces, offsets, size = _layout(items, self._rank)
        if not pieces:
            return
        device = self._parameters[pieces[0].name].device
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        for piece, offset in zip(pieces, offsets, strict=True):
            _view(message, piece, offset).copy_(self._read(self._parameters[piece.name]))
        dist.send(message, dst=self._receiver)

    def _receive(self, items: Sequence[Item]) -> dict[tuple[str, int], torch.Tensor]:
        """The other ranks' shards of a round, by (name, index)."""
        device = next(iter(self._parameters.values())).device
        found, waiting = {}, []
        for rank in sorted({piece.rank for item in items for piece in item.pieces} - {self._receiver}):
            pieces, offsets, size = _layout(items, rank)
            message = torch.empty(size, dtype=torch.uint8, device=device)
            waiting.append(dist.irecv(message, src=rank))
            for piece, offset in zip(pieces, offsets, strict=True):
                found[piece.name, piece.index] = _view(message, piece, offset)
        for request in waiting:
            request.wait()
        return found


def _layout(items: Sequence[Item], rank: int) -> tuple[list[Piece], list[int], int]:
    """A rank's message of a round: its pieces, where each lies in it, and its size in bytes."""
    pieces = [piece for item in items for piece in item.pieces if piece.rank == rank]
    offsets, size = [], 0
    for piece in pieces:
        offsets.append(size)
        size += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return pieces, offsets, size


def _view(message: torch.Tensor, piece: Piece, offset: int) -> torch.Tensor:
    return message[offset : offset + piece.nbytes].view(piece.dtype).view(piece.shape)
