"""The placement of a run on Ray's nodes: one placement group with a bundle a node, each on the node that it is for.

Order: the nodes and what is free of them (`nodes_of_cluster`) -> the placement -> the bundles are granted -> on each
node a probe says which GPUs those are, whether the run's directories are there, and which ports are free. A process
takes no GPU of Ray's: it is put into the bundle of its node, and told its GPUs.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colloid.cluster.processes import Processes
from colloid.cluster.ray_runtime import is_joined, start_ray
from colloid.config.args import Args
from colloid.config.placement import Demand, Node, Placement, Share, demand_of, host
from colloid.config.placement_text import describe_placement
from colloid.config.planner import place
from colloid.config.rundir import weights_disk_dir
from colloid.config.weight_transport import settle_transport
from colloid.engines.addresses import LOOPBACK, lasting_port
from colloid.errors import ConfigError, DeadlineExceeded
from colloid.observe.logs import warn_once

logger = logging.getLogger(__name__)

PLACEMENT_DEADLINE = 120.0
"""Seconds until the cluster must have granted the slots."""
NODE_DEADLINE = 1800.0
"""Seconds until a run that begins again must have as many nodes as before."""
PROBE_DEADLINE = 300.0
"""Seconds until a process must have started on every node."""
POLL_SECONDS = 2.0
NODE_LABEL = "ray.io/node-id"
"""Ray's own, on each node."""


@dataclass(frozen=True)
class Reservation:
    """What Ray has granted. It can be handed to other processes of the run."""

    placement: Placement
    """With the numbers of the GPUs that were granted."""
    group: Any
    """Ray's placement group; None where there is nothing to place."""
    bundles: tuple[int | None, ...]
    """Of each node of the placement its bundle."""
    ports: tuple[int, ...] = ()
    """Free on the node of trainer rank 0; none where the run has one host."""

    @property
    def one_host(self) -> bool:
        """Whether all of the run is on the driver's host: then nothing listens beyond loopback."""
        return not self.ports

    def on_node(self, node: int) -> dict[str, Any]:
        """Options of a Ray actor that is to run on a node of the placement."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[node])
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}

    def rendezvous(self, directory: Path, role: int) -> str:
        """Where the trainer ranks of a role meet: a file on one host, else a port on the node of rank 0.

        Args:
            directory: that of the run.
            role: the number of the role.
        """
        if self.one_host:
            return f"file://{directory.resolve()}/.rendezvous_{time.time_ns()}_{role}"
        return f"tcp://{self.placement.nodes[self.placement.ranks[0].node].address}:{self.ports[role]}"

    def where(self, share: Share) -> str:
        """For people: on which node that is, where the run has several."""
        return "" if self.one_host else f" on node {self.placement.nodes[share.node].address}"


def reserve(args: Args, working_directory: str) -> Reservation:
    """Starts Ray, or joins the cluster that RAY_ADDRESS names; prints the plan, and has its slots reserved.

    Raises:
        ConfigError: the nodes cannot hold what the options ask for, or do not see the run's directories.
    """
    demand = demand_of(args)
    if is_joined():
        start_ray(0, working_directory)
        placement = _place_on_cluster(args, demand)
    else:
        here = place([replace(host(args, demand), address=LOOPBACK)], demand)
        start_ray(here.num_slots, working_directory)
        placement = replace(here, nodes=(replace(here.nodes[0], id=_driver_node()),))
    for line in describe_placement(placement):
        logger.info("placement: %s", line)
    asked = args.update_weight_transport
    settle_transport(args, placement)
    if args.update_weight_transport != asked:
        logger.info("weights go by %s: engines are on other hosts than the trainer", args.update_weight_transport)
    return granted(args, placement)


def nodes_of_cluster(device: str, most: int | None, *, free: bool) -> list[Node]:
    """The cluster's nodes that live, with their slots.

    Args:
        most: slots that are used of a node; None: all.
        free: those that no other job has.
    """
    import ray
    from ray._private.state import available_resources_per_node

    resource = "GPU" if device == "cuda" else "CPU"
    available = available_resources_per_node() if free else {}
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            resources = available.get(node["NodeID"], {}) if free else node["Resources"]
            count = int(resources.get(resource, 0))
            slots = tuple(range(count if most is None else min(most, count)))
            nodes.append(Node(node["NodeManagerAddress"], slots, node["NodeID"]))
    return nodes


def _place_on_cluster(args: Args, demand: Demand) -> Placement:
    """On what is free; waits where other jobs have what is missing, and in a restart for nodes that are gone."""
    start = time.monotonic()
    again = bool(args.num_restarts)
    while True:
        try:
            return place(nodes_of_cluster(args.device, args.num_gpus_per_node, free=True), demand)
        except ConfigError as error:
            if not again:
                place(nodes_of_cluster(args.device, args.num_gpus_per_node, free=False), demand)  # it may never fit
            waited = time.monotonic() - start
            if again and waited > NODE_DEADLINE:
                raise DeadlineExceeded(f"nodes that are gone did not come back in {waited:.0f} s: {error}") from None
            if not again and waited > PLACEMENT_DEADLINE:
                raise ConfigError(f"other jobs hold the slots, after {PLACEMENT_DEADLINE:g} s still: {error}") from None
            warn_once(logger, "waiting for slots that other jobs hold, or whose nodes are gone: %s", error)
        time.sleep(POLL_SECONDS)


def granted(args: Args, placement: Placement) -> Reservation:
    """Has the slots of a placement reserved, and its nodes looked at.

    Raises:
        ConfigError: they are not granted in time, or a node does not see the run's directories.
        DeadlineExceeded: a run that began again is not granted them in time.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    used = placement.slots_by_node()
    nodes = [index for index, slots in enumerate(used) if slots]
    if not nodes:
        return Reservation(placement, None, (None,) * len(used))
    resources = [
        {"CPU": len(used[node])} | ({"GPU": len(used[node])} if args.device == "cuda" else {}) for node in nodes
    ]
    labels = [{NODE_LABEL: placement.nodes[node].id} for node in nodes]
    group = placement_group(resources, strategy="PACK", bundle_label_selector=labels)
    if not group.wait(PLACEMENT_DEADLINE):
        remove_placement_group(group)
        # Where the run began again it had them before: no mistake, but a race that may be won next time.
        raise (DeadlineExceeded if args.num_restarts else ConfigError)(
            f"the cluster did not grant {placement.num_slots} slots on {len(nodes)} nodes within "
            f"{PLACEMENT_DEADLINE:g} s: other jobs took them, or a node has fewer free CPUs than slots"
        )
    bundles = tuple(nodes.index(node) if node in nodes else None for node in range(len(used)))
    reservation = Reservation(placement, group, bundles)
    one_host = {placement.nodes[node].id for node in nodes} == {_driver_node()}
    if one_host and args.device == "cpu":
        return reservation
    try:
        found = _probe(args, reservation, nodes, [len(used[node]) for node in nodes])
    except BaseException:
        remove_placement_group(group)
        raise
    if args.device == "cuda":
        gpus = dict(zip(nodes, (facts.gpus for facts in found), strict=True))
        granted = [gpus.get(node, ()) for node in range(len(used))]
        reservation = replace(reservation, placement=placement.with_slots(granted))
    first = placement.ranks[0].node if placement.ranks else nodes[0]
    return reservation if one_host else replace(reservation, ports=found[nodes.index(first)].ports)


@dataclass(frozen=True)
class NodeFacts:
    """What a probe finds on its node."""

    gpus: tuple[int, ...]
    missing: tuple[str, ...]
    """Of the paths that it was asked for."""
    ports: tuple[int, ...]


class NodeProbe:
    """A process on a node that is to be used."""

    def look(self, paths: Sequence[str], num_ports: int) -> NodeFacts:
        """Its GPUs, which of the paths are not there, and free ports."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        address = ray.util.get_node_ip_address()
        return NodeFacts(
            tuple(sorted(int(gpu) for gpu in gpus)),
            tuple(path for path in paths if not os.path.exists(path)),
            tuple(lasting_port(address) for _ in range(num_ports)),
        )


def _probe(args: Args, reservation: Reservation, nodes: Sequence[int], counts: Sequence[int]) -> list[NodeFacts]:
    """Has every node looked at.

    Raises:
        ConfigError: a node does not see a directory that all must share.
    """
    import ray

    kind, processes = ray.remote(NodeProbe), Processes(logger.info)
    probes = []
    for node, count in zip(nodes, counts, strict=True):
        options = reservation.on_node(node) | ({"num_gpus": count} if args.device == "cuda" else {})
        name = f"the probe of node {reservation.placement.nodes[node].address}"
        probes.append(processes.add(name, kind.options(**options).remote()))
    with _Markers(shared_directories(args)) as markers:
        wanted = [*markers.paths, *needed_paths(args)]
        references = [probe.look.remote(wanted, 2) for probe in probes]
        found = processes.wait(references, "a process on every node", PROBE_DEADLINE)
    for probe in probes:
        ray.kill(probe)
    for node, facts in zip(nodes, found, strict=True):
        if facts.missing:
            address = reservation.placement.nodes[node].address
            missing = ", ".join(markers.directories.get(path, path) for path in facts.missing)
            raise ConfigError(
                f"node {address} does not see {missing} as the driver does: the run directory, checkpoints, weights on "
                "disk and models must lie where all nodes have them at the same path (docs/cluster.md). --outputs-dir "
                "chooses where the run directory is"
            )
    return found


def shared_directories(args: Args) -> list[str]:
    """Those that processes on several nodes write to, as absolute paths; what lies in the run directory is left out."""
    run_dir = os.path.abspath(args.run_dir)
    others = [args.save, weights_disk_dir(args) if args.update_weight_transport == "disk" else None]
    found = [os.path.abspath(path) for path in others if path]
    return list(dict.fromkeys([run_dir, *(path for path in found if os.path.commonpath([path, run_dir]) != run_dir)]))


def needed_paths(args: Args) -> list[str]:
    """What every node must be able to read: models and checkpoints, where the driver sees them."""
    names = [args.hf_checkpoint, args.load, args.ref_load, args.init_checkpoint, args.opd_teacher_load]
    return [path for path in dict.fromkeys(filter(None, names)) if os.path.exists(path)]


class _Markers:
    """A file in each of some directories, as long as it is open."""

    def __init__(self, directories: Sequence[str]):
        name = f".node-check-{secrets.token_hex(8)}"
        self.directories = {os.path.join(directory, name): directory for directory in directories}

    @property
    def paths(self) -> list[str]:
        return list(self.directories)

    def __enter__(self) -> _Markers:
        for path, directory in self.directories.items():
            try:
                Path(directory).mkdir(parents=True, exist_ok=True)
                Path(path).touch()
            except OSError as error:
                self.__exit__()
                raise ConfigError(f"nothing can be written to {directory}: {error}") from error
        return self

    def __exit__(self, *_rest: object) -> None:
        for path in self.directories:
            Path(path).unlink(missing_ok=True)


def beside_driver() -> dict[str, Any]:
    """Options of a Ray actor that is to run on the driver's node, and takes no slot."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(_driver_node(), soft=False)}


def _driver_node() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()
