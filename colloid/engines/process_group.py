"""A process group of one trainer rank and the engines' ranks, beside whatever world each of them is in.

The trainer rank is 0 and keeps the store in which all find each other; nothing listens beyond the address that the
engines reach it at. The prefixes in the store are those that torch gives a group that is made by name, so that any
engine that makes its side with torch's own functions meets this one.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

BACKENDS = ("gloo", "nccl")


class UpdateGroup:
    """One rank's side. Making it waits until all ranks are there.

    Args:
        store: see `serve_store` and `connect_store`.
        host: this host's address towards the other ranks.
        timeout: seconds that joining, and each broadcast, may take.

    Raises:
        RuntimeError: a rank did not come in time.
    """

    def __init__(self, backend: str, store: dist.Store, rank: int, size: int, name: str, host: str, timeout: float):
        device = "cpu" if backend == "gloo" else "cuda"
        self._store = store
        named = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
        own = dist.PrefixStore(f"{device}/", named)
        limit = timedelta(seconds=timeout)
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = limit
            self._group = dist.ProcessGroupGloo(own, rank, size, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(own, rank, size, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Rank 0's contiguous tensor, to all; `wait()` raises RuntimeError where a rank has gone."""
        return self._group.broadcast([tensor], self._options)


def serve_store(host: str, size: int, timeout: float, port: int = 0) -> tuple[dist.TCPStore, int]:
    """The store and its port (0: any free one); it listens at `host` alone."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    listening.listen(2 * size)
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        size,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port


def connect_store(host: str, port: int, timeout: float) -> dist.TCPStore:
    """The store that another rank serves."""
    return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)
