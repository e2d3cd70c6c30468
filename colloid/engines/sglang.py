"""The real SGLang as an engine: how its server is started. It runs in a process of its own, with the interpreter that
has it; nothing here imports it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colloid.engines.addresses import lasting_port
from colloid.engines.control import EngineControl
from colloid.errors import EngineError

MODULE = "sglang.launch_server"
HEALTH_TIMEOUT = 5.0
MEETING_PORTS = 8
"""In a row, for an engine of several nodes: its rendezvous, and with attention in groups the sockets beside it."""

ALWAYS: dict[str, Any] = {
    # An idle server without it keeps a core busy: its scheduler asks for requests in a loop.
    "sleep-on-idle": True,
    "skip-server-warmup": True,
    "weight-version": "0",
    # The client asks them whether tokens come, see colloid.rollout.client.
    "enable-metrics": True,
}
ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-overlap-schedule": True,
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
    "mem-fraction-static": 0.3,
    "max-running-requests": 64,
}
"""What serves on a CPU without SGLang's own kernels; options that the user gave win."""


@dataclass(frozen=True)
class ServerPlan:
    """A server to be started."""

    url: str
    options: dict[str, Any]
    environment: dict[str, str]


@dataclass(frozen=True)
class SeveralNodes:
    """Of which node of an engine a server is the part."""

    rank: int
    count: int
    meeting_point: str
    """`address:port` on node 0; SGLang also takes the ports after it, `MEETING_PORTS` in all."""


def plan(
    options: dict[str, Any],
    model_path: str,
    host: str,
    gpus: Sequence[int] | None,
    nodes: SeveralNodes | None = None,
    share: int = 0,
) -> ServerPlan:
    """What the server's command line and environment are.

    Args:
        options: of the command line, without dashes; `tp-size` counts the ranks of all nodes.
        gpus: numbers of its GPUs on this host; None: the engine is on the CPU.
        nodes: where the engine has several.
        share: of the host's ports, see `lasting_port`: another for each engine there.
    """
    port = lasting_port(host, share=share)
    cpu = gpus is None
    chosen = {"model-path": model_path, "host": host, "port": port, **ALWAYS, **(ON_CPU if cpu else {}), **options}
    ranks = chosen.get("tp-size", 1)
    if nodes is not None:
        chosen |= {"nnodes": nodes.count, "node-rank": nodes.rank, "dist-init-addr": nodes.meeting_point}
        ranks //= nodes.count
    environment = {"HF_HUB_OFFLINE": "1"}
    if chosen.get("enable-memory-saver"):
        # The router asks for /health at any time, which would generate a token in memory that is released.
        environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    if cpu:
        environment |= {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        if chosen.get("tp-size", 1) > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(sorted(os.sched_getaffinity(0)), ranks)
    else:
        # SGLang counts from the first of those that it sees.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    chosen = {name: value for name, value in chosen.items() if value is not False}
    return ServerPlan(f"http://{host}:{port}", chosen, environment)


def cores_of_ranks(cores: list[int], num_ranks: int) -> str:
    """As SGLang takes them, which by itself gives each rank a NUMA node: `0-3|4-7`."""
    count = len(cores)
    shares = [cores[rank * count // num_ranks : (rank + 1) * count // num_ranks] for rank in range(num_ranks)]
    shares = [share or [cores[rank % count]] for rank, share in enumerate(shares)]
    return "|".join(f"{share[0]}-{share[-1]}" if len(share) > 1 else str(share[0]) for share in shares)


def write_key(path: Path, api_key: str) -> Path:
    """The key as a configuration file of SGLang's that only this user can read: it shows in no process list."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f'api-key: "{api_key}"\n')
    return path


def poll(url: str, api_key: str) -> str | None:
    """The address, if the server is healthy."""
    try:
        EngineControl(url, api_key, timeout=HEALTH_TIMEOUT).get("/health")
    except EngineError:
        return None
    return url
