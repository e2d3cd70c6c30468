"""Which device slot of which node runs what: plain data, made before anything starts.

A slot is one GPU, or on a machine without CUDA one process. Invariants of a `Placement`:

- no slot is given twice; with `colocate` an engine lies wholly on slots of trainer ranks, or wholly on others
- ranks are numbered node after node, so that groups of neighbouring ranks (tensor, expert) stay within a node where
  they divide `--actor-num-gpus-per-node`
- an engine lies within one node where its slots fit into one, else it has whole nodes of equal size
- nodes and slots are in the order of their numbers: 10.0.0.9 before 10.0.0.10, GPU 2 before GPU 10
- the same nodes and the same demand: the same placement
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from colloid.config.args import Args
from colloid.config.devices import num_cuda_devices
from colloid.config.eval_config import has_trainer
from colloid.config.served_models import PLACEHOLDER, REGULAR, added_teacher
from colloid.config.sft import serves

USUAL_GPUS = 8
"""Of a node, where nobody says."""


@dataclass(frozen=True)
class Node:
    """A machine, or on a test machine a part of one."""

    address: str
    slots: tuple[int, ...]
    """GPU numbers; on a CPU 0, 1, …"""
    id: str = ""
    """The cluster's own name for it."""


@dataclass(frozen=True)
class Share:
    """What an engine, or a trainer rank, has of one node."""

    node: int
    """Index among the placement's nodes."""
    slots: tuple[int, ...]


Place = tuple[Share, ...]
"""Of one engine: a share a node; the first node's serves."""


@dataclass(frozen=True)
class Demand:
    """What is to be placed.

    Attributes:
        engines: slots of each engine, in the order of models and groups; a slot of a placeholder counts as one.
        frozen: slots of each engine that never shares a slot.
        kinds: what each of `engines` is, for people; without it all are engines.
    """

    trainer_nodes: int
    trainer_slots_per_node: int
    engines: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    colocate: bool = False
    kinds: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.trainer_nodes * self.trainer_slots_per_node

    @property
    def num_slots(self) -> int:
        """At the least: where nothing is left over on a node."""
        engines = sum(self.engines)
        shared = max(self.num_ranks, engines) if self.colocate else self.num_ranks + engines
        return shared + sum(self.frozen)


@dataclass(frozen=True)
class Placement:
    """Where everything is."""

    nodes: tuple[Node, ...]
    ranks: tuple[Share, ...]
    """One slot a trainer rank."""
    engines: tuple[Place, ...]
    frozen: tuple[Place, ...]
    kinds: tuple[str, ...] = ()
    """As of the demand."""

    def slots_by_node(self) -> list[tuple[int, ...]]:
        """Of every node the slots that anything runs on."""
        found: list[set[int]] = [set() for _ in self.nodes]
        for share in (*self.ranks, *(share for place in (*self.engines, *self.frozen) for share in place)):
            found[share.node].update(share.slots)
        return [tuple(sorted(slots)) for slots in found]

    @property
    def num_slots(self) -> int:
        return sum(map(len, self.slots_by_node()))

    def hosts(self, places: Iterable[Place]) -> set[str]:
        """The addresses of all nodes of some engines."""
        return {self.nodes[share.node].address for place in places for share in place}

    def with_slots(self, slots: Sequence[tuple[int, ...]]) -> Placement:
        """The same with other numbers for the slots that are used.

        Args:
            slots: of each node as many as it uses, in any order.
        """
        names = []
        for old, new in zip(self.slots_by_node(), slots, strict=True):
            names.append(dict(zip(old, sorted(new), strict=True)))

        def renamed(share: Share) -> Share:
            return replace(share, slots=tuple(names[share.node][slot] for slot in share.slots))

        def places(of: Iterable[Place]) -> tuple[Place, ...]:
            return tuple(tuple(map(renamed, place)) for place in of)

        nodes = tuple(replace(node, slots=tuple(sorted(new))) for node, new in zip(self.nodes, slots, strict=True))
        return Placement(nodes, tuple(map(renamed, self.ranks)), places(self.engines), places(self.frozen), self.kinds)


def by_number(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Nodes in the order of their addresses, each with its slots in order."""
    return tuple(sorted((replace(node, slots=tuple(sorted(node.slots))) for node in nodes), key=_node_key))


def _node_key(node: Node) -> tuple[Any, ...]:
    try:
        address = ipaddress.ip_address(node.address)
        return (0, address.version, int(address), (), node.id)
    except ValueError:
        words = re.split(r"(\d+)", node.address)
        return (1, 0, 0, tuple(int(word) if index % 2 else word for index, word in enumerate(words)), node.id)


def demand_of(args: Args) -> Demand:
    """What the options ask for. A critic has the slots of the policy's ranks."""
    trains, slots = has_trainer(args), args.rollout_num_gpus_per_engine
    engines = [engine for _, engine in _engines(args)] if serves(args) else []
    teacher = serves(args) and added_teacher(args) is not None
    return Demand(
        args.actor_num_nodes if trains else 0,
        args.actor_num_gpus_per_node,
        tuple(size for _, size in engines),
        (slots,) if teacher else (),
        bool(args.colocate) and trains,
        tuple(kind for kind, _ in engines) if args.sglang_config is not None else (),
    )


def places_of_model(args: Args, placement: Placement, name: str) -> tuple[Place, ...]:
    """Where the engines of a model are, in the order of its groups."""
    pairs = zip(_engines(args), placement.engines, strict=True)
    return tuple(found for (model, (kind, _)), found in pairs if model == name and kind != PLACEHOLDER)


def _engines(args: Args) -> Iterator[tuple[str, tuple[str, int]]]:
    """Of each engine its model, what it is, and its slots."""
    for model in args.sglang_models:
        for group in model.groups:
            if group.worker_type == PLACEHOLDER:
                yield from ((model.name, (PLACEHOLDER, 1)) for _ in range(group.num_gpus))
                continue
            of_type = "" if group.worker_type == REGULAR else f" {group.worker_type}"
            kind = f"{model.name}{of_type} engine"
            yield from ((model.name, (kind, group.num_gpus_per_engine)) for _ in range(group.num_engines))


def host(args: Args, demand: Demand) -> Node:
    """This machine; on a CPU it has as many slots as are asked for."""
    count = demand.num_slots + sum(demand.engines)
    if args.device == "cuda":
        count = min(num_cuda_devices(), args.num_gpus_per_node or num_cuda_devices())
    return Node("this host", tuple(range(count)))


def assumed_nodes(args: Args, demand: Demand) -> tuple[Node, ...]:
    """The nodes of a plan that is made without a cluster: this host alone, unless `--num-gpus-per-node` is given or a
    cluster is named by RAY_ADDRESS.
    """
    size = args.num_gpus_per_node
    if size is None and os.environ.get("RAY_ADDRESS"):
        size = USUAL_GPUS if args.device == "cuda" else args.actor_num_gpus_per_node
    if size is None:
        return (host(args, demand),)
    most = demand.trainer_nodes + 2 * sum(-(-slots // size) for slots in (*demand.engines, *demand.frozen))
    return tuple(Node(f"node {index}", tuple(range(size))) for index in range(max(1, most)))
