"""Engines on the nodes that they are placed on: each process is the child of a Ray actor there, and dies with it.

    fleet (rollout actor) ──launch──► EngineHandle ──Ray──► EngineHost on the node ──► engine process
                                                            EngineHost on the next ──► its part of a wide engine

The fleet cannot tell such a handle from one of its own host. Nothing in here blocks before `wait_until_ready`.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colloid.cluster.placement import Reservation
from colloid.cluster.processes import last_line
from colloid.config.placement import Share
from colloid.engines.addresses import lasting_port
from colloid.engines.launch import (
    START_DEADLINE,
    EngineConfig,
    EngineHandle,
    EnginePart,
    Launch,
    LaunchedEngine,
    launch_engine,
    port_share,
)
from colloid.engines.sglang import MEETING_PORTS
from colloid.errors import EngineError, written_for_user

HOST_DEADLINE = 120.0
"""Seconds until the process that starts an engine must be there itself."""
STOP_MARGIN = 30.0
"""Seconds beyond the grace period in which an engine on another node must have ended."""
POLL_SECONDS = 0.2
NODE_GONE = -9
"""The exit code of an engine that went with its node."""


class EngineHost:
    """The Ray side: starts one process, and knows what becomes of it. Several calls run at the same time; those that
    need the process take what `launch` returns.
    """

    def __init__(self) -> None:
        self._engine: LaunchedEngine | None = None

    def meeting_point(self, share: int) -> str:
        """`address:port` on this node, where the parts of a wide engine can meet; `share` as of `lasting_port`."""
        import ray

        address = ray.util.get_node_ip_address()
        return f"{address}:{lasting_port(address, MEETING_PORTS, share)}"

    def launch(self, config: EngineConfig, name: str, index: int, meeting_point: str | None) -> None:
        """Starts the process. GPUs that Ray has given this actor go before those of `config`."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if gpus and config.gpus is not None:
            config = replace(config, gpus=tuple(sorted(map(int, gpus))))
        if config.part is not None:
            config = replace(config, part=replace(config.part, meeting_point=meeting_point))
        # A node that an engine was moved to has another address than planned.
        self._engine = launch_engine(replace(config, host=ray.util.get_node_ip_address()), name, index)

    def ready(self, _launched: None) -> tuple[str, int]:
        """Its address and its process, once it serves."""
        return self._engine.wait_until_ready(), self._engine.pid

    def ended(self, _launched: None) -> tuple[int, str]:
        """Its exit code and how it ended. Returns when it has."""
        import ray

        while (code := self._engine.exit_code) is None:
            time.sleep(POLL_SECONDS)
        return code, self._engine.how_it_ended(f"on node {ray.util.get_node_ip_address()}")

    def terminate(self) -> None:
        if self._engine is not None:
            self._engine.terminate()

    def stop(self, grace: float) -> None:
        if self._engine is not None:
            self._engine.stop(grace)


def launch_on(reservation: Reservation, device: str) -> Launch:
    """What starts the engines of a run: they are children of the fleet's process where all is on one host."""
    return launch_engine if reservation.one_host else EngineHosts(reservation, device).launch


class EngineHosts:
    """Starts engines where the placement has them; of a node that is gone, on any that has free slots.

    It is handed to the process that has the fleet.
    """

    def __init__(self, reservation: Reservation, device: str):
        self._slots, self._device = reservation, device

    def launch(self, config: EngineConfig, name: str, index: int) -> EngineHandle:
        """Starts an engine at `config.place`. Returns at once."""
        import ray

        place = config.place
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        kept = all(self._slots.placement.nodes[share.node].id in alive for share in place)
        group, options = (None, [self._slots.on_node(share.node) for share in place]) if kept else self._moved(place)
        parts = []
        host = ray.remote(EngineHost)
        actors = [host.options(max_concurrency=8, **each).remote() for each in options]
        meeting = actors[0].meeting_point.remote(port_share(config, index)) if len(actors) > 1 else None
        for number, (actor, share) in enumerate(zip(actors, place, strict=True)):
            own = replace(config, gpus=share.slots if config.gpus is not None else None)
            if len(place) > 1:
                own = replace(own, part=EnginePart(number, len(place)))
            launched = actor.launch.remote(own, name if number == 0 else f"{name}_part_{number}", index, meeting)
            address = self._slots.placement.nodes[share.node].address if kept else "another node"
            parts.append(_Part(actor, address, launched, actor.ended.remote(launched)))
        return RemoteEngine(parts, config, name, group)

    def _moved(self, place: tuple[Share, ...]) -> tuple[Any, list[dict[str, Any]]]:
        """As many slots anywhere, and the options of the actors on them."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [
            {"CPU": len(share.slots)} | ({"GPU": len(share.slots)} if self._device == "cuda" else {}) for share in place
        ]
        group = placement_group(bundles, strategy="STRICT_SPREAD" if len(place) > 1 else "PACK")
        return group, [
            {
                "num_cpus": 0,
                "num_gpus": bundle.get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            }
            for number, bundle in enumerate(bundles)
        ]


@dataclass
class _Part:
    """One process of an engine."""

    actor: Any
    address: str
    """Of its node, for people."""
    launched: Any
    ended: Any
    """A Ray reference that comes when the process has ended, or an error when its node has."""

    def __post_init__(self) -> None:
        self._end: Future = self.ended.future()

    def end(self) -> tuple[int, str] | None:
        """Exit code and how it ended; None while it runs."""
        if not self._end.done():
            return None
        error = self._end.exception()
        if error is None:
            return self._end.result()
        written = written_for_user(error)
        if written is not None:
            return 1, str(written)
        return NODE_GONE, f"ended on node {self.address}, which is gone, or its Ray actor: {last_line(error)}"


class RemoteEngine:
    """An `EngineHandle` of an engine on other nodes.

    Args:
        parts: the first one serves.
        group: the placement group that it alone has.
    """

    is_here = False

    def __init__(self, parts: list[_Part], config: EngineConfig, name: str, group: Any):
        self._parts, self._group, self._kind = parts, group, config.kind
        self._start = time.monotonic()
        self._up: Future = parts[0].launched.future()
        self._ready: Future = parts[0].actor.ready.remote(parts[0].launched).future()
        self._log_path = config.log_dir / f"{name}.log"

    @property
    def pid(self) -> int:
        """0 until it serves."""
        return self._ready.result()[1] if self._ready.done() and self._ready.exception() is None else 0

    @property
    def log_path(self) -> Path:
        return self._log_path

    @property
    def exit_code(self) -> int | None:
        return next((end[0] for part in self._parts if (end := part.end()) is not None), None)

    def wait_until_ready(self) -> str:
        deadline = self._start + HOST_DEADLINE + START_DEADLINE[self._kind]
        while not self._ready.done():
            waited = time.monotonic() - self._start
            if self.exit_code is not None:
                raise EngineError(f"an engine {self.how_it_ended('before it served')}")
            if not self._up.done() and waited > HOST_DEADLINE:
                what = ", ".join(part.address for part in self._parts)
                raise EngineError(
                    f"an engine cannot be started on {what}: after {waited:.0f} s there is no process of Ray's. Are "
                    "there free slots?"
                )
            if time.monotonic() > deadline:
                raise EngineError(f"an engine on {self._parts[0].address} does not serve after {waited:.0f} s")
            time.sleep(POLL_SECONDS)
        error = self._ready.exception()
        if error is None:
            return self._ready.result()[0]
        written = written_for_user(error)
        reason = written or f"an engine {self.how_it_ended('before it served')}"
        raise EngineError(f"on node {self._parts[0].address}: {reason}") from error

    def how_it_ended(self, when: str = "") -> str:
        for part in self._parts:
            end = part.end()
            if end is not None:
                return end[1].replace(" on node ", f" {when} on node ", 1) if when else end[1]
        return "has not ended"

    def terminate(self) -> None:
        for part in self._parts:
            part.actor.terminate.remote()

    def stop(self, grace: float = 5.0) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        stopping = [part.actor.stop.remote(grace) for part in self._parts]
        ray.wait(stopping, num_returns=len(stopping), timeout=grace + STOP_MARGIN)
        for part in self._parts:
            ray.kill(part.actor)  # and with it what is left of the process
        if self._group is not None:
            remove_placement_group(self._group)
