"""The real SGLang as an engine: how its server is started. It runs in a process of its own, with the interpreter that
has it; nothing here imports it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colloid.engines.addresses import lasting_port
from colloid.engines.control import EngineControl
from colloid.errors import EngineError

MODULE = "sglang.launch_server"
HEALTH_TIMEOUT = 5.0

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


def plan(options: dict[str, Any], model_path: str, host: str, first_gpu: int | None, index: int) -> ServerPlan:
    """What the server's command line and environment are.

    Args:
        options: of the command line, without dashes.
        first_gpu: number of the first engine's first GPU; None: the engine is on the CPU.
        index: the engine's number.
    """
    port = lasting_port(host)
    cpu = first_gpu is None
    chosen = {"model-path": model_path, "host": host, "port": port, **ALWAYS, **(ON_CPU if cpu else {}), **options}
    environment = {"HF_HUB_OFFLINE": "1"}
    if cpu:
        environment |= {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        if chosen.get("tp-size", 1) > 1:
            cores = sorted(os.sched_getaffinity(0))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(cores, chosen["tp-size"])
    else:
        count = chosen.get("tp-size", 1)
        gpus = range(first_gpu + index * count, first_gpu + (index + 1) * count)
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
