"""How trainer ranks find each other: by a file on one host, which nothing listens for, else by a store that rank 0
serves at its node's address alone.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from colloid.engines.process_group import connect_store, serve_store
from colloid.errors import ColloidError


def join(init_method: str, rank: int, world_size: int, backend: str, timeout: timedelta) -> None:
    """Joins the world of trainer ranks. Returns when all are there.

    Args:
        init_method: `file:///…` or `tcp://address:port`, an address of rank 0's node.
        timeout: of this, and of each collective operation later.
    """
    where: dict[str, Any] = {"init_method": init_method}
    if init_method.startswith("tcp://"):
        parts = urlsplit(init_method)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{init_method} is no tcp://address:port")
        seconds = timeout.total_seconds()
        try:
            if rank == 0:
                where = {"store": serve_store(parts.hostname, world_size, seconds, parts.port)[0]}
            else:
                where = {"store": connect_store(parts.hostname, parts.port, seconds)}
        except (OSError, RuntimeError) as error:
            raise ColloidError(f"trainer rank {rank} cannot meet the others at {init_method}: {error}") from error
    dist.init_process_group(backend=backend, rank=rank, world_size=world_size, timeout=timeout, **where)
