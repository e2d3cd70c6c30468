"""A placement as a person reads it: neighbouring nodes that hold the same are one line, so that 512 nodes are few."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from colloid.config.placement import Placement

MOST_LINES = 40


@dataclass
class _Run:
    """Neighbouring nodes that hold the same kinds of things on the same slots, numbered on from node to node."""

    first_node: int
    last_node: int
    entries: list[_Entry]


@dataclass
class _Entry:
    """Some of one kind on the same slots of a node."""

    kind: str
    slots: tuple[int, ...]
    """Of all of them."""
    each: int
    """Slots that one has."""
    num_nodes: int
    """That one lies on."""
    first: int
    last: int


def describe_placement(placement: Placement) -> list[str]:
    """One line a run of nodes."""
    runs: list[_Run] = []
    for node, entries in enumerate(_entries(placement)):
        last = runs[-1] if runs else None
        if last is not None and last.last_node == node - 1 and _continues(last.entries, entries):
            last.last_node = node
            for entry, new in zip(last.entries, entries, strict=True):
                entry.last = new.last
        else:
            runs.append(_Run(node, node, entries))
    lines = [line for run in runs if (line := _line(placement, run))]
    rest = len(lines) - MOST_LINES
    return lines if rest <= 0 else [*lines[:MOST_LINES], f"… and {rest} lines more"]


def ranges(numbers: tuple[int, ...]) -> str:
    """`(0, 1, 2, 5)` -> `0-2,5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _entries(placement: Placement) -> list[list[_Entry]]:
    """Of each node what it holds."""
    held: list[dict[tuple, list[tuple[int, tuple[int, ...]]]]] = [defaultdict(list) for _ in placement.nodes]
    for rank, share in enumerate(placement.ranks):
        held[share.node]["trainer rank", 1, 1].append((rank, share.slots))
    kinds = placement.kinds or ("engine",) * len(placement.engines)
    places = [*zip(kinds, placement.engines, strict=True), *(("frozen engine", place) for place in placement.frozen)]
    numbers: Counter[str] = Counter()
    for kind, place in places:
        for share in place:
            held[share.node][kind, sum(len(one.slots) for one in place), len(place)].append(
                (numbers[kind], share.slots)
            )
        numbers[kind] += 1
    found: list[list[_Entry]] = []
    for on_node in held:
        entries: list[_Entry] = []
        for (kind, size, num_nodes), members in on_node.items():
            for index, slots in members:
                before = entries[-1] if entries else None
                same = before is not None and (before.kind, before.each, before.num_nodes) == (kind, size, num_nodes)
                if before is not None and same and index == before.last + 1:
                    before.last, before.slots = index, before.slots + slots
                else:
                    entries.append(_Entry(kind, slots, size, num_nodes, index, index))
        found.append(entries)
    return found


def _continues(before: list[_Entry], after: list[_Entry]) -> bool:
    if len(before) != len(after) or not after:
        return not before and not after
    for old, new in zip(before, after, strict=True):
        same = (old.kind, old.slots, old.each, old.num_nodes) == (new.kind, new.slots, new.each, new.num_nodes)
        if not same or new.first - old.last not in ((1,) if new.num_nodes == 1 else (0, 1)):
            return False
    return True


def _line(placement: Placement, run: _Run) -> str:
    if not run.entries:
        return ""
    nodes = placement.nodes[run.first_node : run.last_node + 1]
    where = nodes[0].address if len(nodes) == 1 else f"{nodes[0].address} … {nodes[-1].address} ({len(nodes)} nodes)"
    return f"{where}: " + "; ".join(_words(entry) for entry in run.entries)


def _words(entry: _Entry) -> str:
    number = ranges(tuple(range(entry.first, entry.last + 1)))
    several = entry.last > entry.first
    text = f"{entry.kind}{'s' * several} {number} on slot{'s' * (len(entry.slots) > 1)} {ranges(entry.slots)}"
    if entry.num_nodes > 1:
        return f"{text} ({entry.each} slots over {entry.num_nodes} nodes{' each' * several})"
    return text + (f" ({entry.each} each)" if entry.kind != "trainer rank" and several and entry.each > 1 else "")
