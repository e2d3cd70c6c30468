"""From nodes and a demand to a placement: the trainer first, then each engine at the first place where it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from colloid.config.placement import Demand, Node, Place, Placement, Share, by_number
from colloid.errors import ConfigError

Free = list[list[int]]
"""Of each node the slots that are free, in order."""


def place(nodes: Iterable[Node], demand: Demand) -> Placement:
    """The placement of a demand.

    The trainer's `trainer_slots_per_node` ranks are put on a node of their own each, or, where there are too few nodes
    or the engines then don't fit, as many on a node as it has room for.

    Raises:
        ConfigError: it does not fit; with the equation and its numbers.
    """
    ordered = by_number(nodes)
    reason = _too_few(ordered, demand)
    if reason is None:
        for spread in (True, False):
            for largest_first in (False, True):
                found = _try(ordered, demand, spread, largest_first)
                if isinstance(found, Placement):
                    return found
                reason = reason or found
    raise ConfigError(f"{_equation(demand)}; {_describe(ordered)}. {reason}")


def _try(nodes: tuple[Node, ...], demand: Demand, spread: bool, largest_first: bool) -> Placement | str:
    """A placement, or why there is none."""
    free: Free = [list(node.slots) for node in nodes]
    ranks = _place_trainer(free, demand, spread)
    if ranks is None:
        return (
            f"No {demand.trainer_nodes} × {demand.trainer_slots_per_node} slots are free for the trainer: change "
            "--actor-num-nodes or --actor-num-gpus-per-node"
        )
    trainer: Free = [[] for _ in nodes]
    for share in ranks:
        trainer[share.node] += share.slots
    own = _Room(free, max((len(node.slots) for node in nodes), default=0), [len(node.slots) for node in nodes])
    rooms = [own]
    if demand.colocate:
        sizes = [len(slots) for slots in trainer]
        rooms.insert(0, _Room(trainer, max(sizes, default=0), sizes))
    engines: dict[int, Place] = {}
    order = range(len(demand.engines))
    for index in sorted(order, key=lambda engine: -demand.engines[engine]) if largest_first else order:
        found = next((spot for room in rooms if (spot := room.take(demand.engines[index]))), None)
        if found is None:
            return _no_room(demand.engines[index], len(engines), len(demand.engines), rooms, demand.colocate)
        engines[index] = found
    frozen: list[Place] = []
    for slots in demand.frozen:
        found = own.take(slots)
        if found is None:
            return "Engines on slots of their own: " + _no_room(slots, len(frozen), len(demand.frozen), [own])
        frozen.append(found)
    return Placement(nodes, ranks, tuple(engines[index] for index in order), tuple(frozen), demand.kinds)


def _place_trainer(free: Free, demand: Demand, spread: bool) -> tuple[Share, ...] | None:
    """Takes the trainer's slots; None: there is no room."""
    size, missing = demand.trainer_slots_per_node, demand.trainer_nodes
    ranks: list[Share] = []
    for node, slots in enumerate(free):
        count = min(missing, min(1, len(slots) // size) if spread else len(slots) // size)
        ranks += [Share(node, (slot,)) for slot in slots[: count * size]]
        del slots[: count * size]
        missing -= count
    return None if missing else tuple(ranks)


class _Room:
    """Slots that engines may have.

    Args:
        free: shared with others that take from it.
        largest: an engine of no more slots lies within one node.
        sizes: what a node has when all of it is free.
    """

    def __init__(self, free: Free, largest: int, sizes: Sequence[int]):
        self.free, self.largest, self.sizes = free, largest, sizes
        self._first = 0  # the nodes before it are full

    def take(self, count: int) -> Place | None:
        """The first place that an engine of `count` slots fits in, or None."""
        free = self.free
        while self._first < len(free) and not free[self._first]:
            self._first += 1
        if count <= self.largest:
            node = next((index for index in range(self._first, len(free)) if len(free[index]) >= count), None)
            return None if node is None else (self._share(node, count),)
        whole = [node for node, slots in enumerate(free) if slots and len(slots) == self.sizes[node]]
        for size in sorted({self.sizes[node] for node in whole}, reverse=True):
            nodes = [node for node in whole if self.sizes[node] == size][: count // size]
            if count % size == 0 and len(nodes) * size == count:
                return tuple(self._share(node, size) for node in nodes)
        return None

    def _share(self, node: int, count: int) -> Share:
        slots = self.free[node]
        taken = tuple(slots[:count])
        del slots[:count]
        return Share(node, taken)


def _equation(demand: Demand) -> str:
    parts = []
    if demand.num_ranks:
        parts.append(
            f"{demand.trainer_nodes} × {demand.trainer_slots_per_node} = {demand.num_ranks} slots of trainer ranks"
        )
    for more, sizes in (("", demand.engines), (" beside them", demand.frozen)):
        for size, count in Counter(sizes).items():
            parts.append(f"{count} engine{'s' * (count > 1)}{more} × {size} = {count * size} slots")
    joined = " and ".join(parts)
    return f"the run needs {joined}{', colocated' if demand.colocate else ''}: at least {demand.num_slots}"


def _describe(nodes: Sequence[Node]) -> str:
    sizes = Counter(len(node.slots) for node in nodes if node.slots)
    total = sum(size * count for size, count in sizes.items())
    shown = " + ".join(f"{count} node{'s' * (count > 1)} × {size}" for size, count in sizes.items()) or "no nodes"
    return f"there are {shown} = {total}"


def _too_few(nodes: Sequence[Node], demand: Demand) -> str | None:
    have, largest = sum(len(node.slots) for node in nodes), max((len(node.slots) for node in nodes), default=0)
    if demand.num_ranks and demand.trainer_slots_per_node > largest:
        return f"--actor-num-gpus-per-node {demand.trainer_slots_per_node} is more than any node has, {largest}"
    if demand.num_slots > have:
        more = "" if demand.colocate else ", or use --colocate"
        return f"{demand.num_slots} > {have}: lower --actor-num-gpus-per-node or --rollout-num-gpus{more}"
    return None


def _no_room(slots: int, placed: int, wanted: int, rooms: Sequence[_Room], colocate: bool = False) -> str:
    largest = rooms[0].largest
    if slots > max(room.largest for room in rooms):
        rule = f"{slots} slots are more than a node has ({largest}), so an engine takes whole free nodes of equal size"
    else:
        rule = f"an engine of {slots} slots lies within one node"
        if colocate:
            rule += ", wholly on slots of the trainer or wholly on others"
    free = Counter(len(left) for room in rooms for left in room.free if left)
    left = ", ".join(f"{count} × {size}" for size, count in sorted(free.items(), reverse=True)) or "none"
    return (
        f"Only {placed} of {wanted} engines fit: {rule}; slots left on nodes: {left}. Change "
        "--rollout-num-gpus-per-engine or --rollout-num-gpus"
    )
