"""Addresses and ports of this host: where servers listen, and how others reach them. Nothing here sends anything."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from colloid.errors import EngineError

LOOPBACK = "127.0.0.1"
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 20000
"""Ray's workers are below."""
PORT_ATTEMPTS = 100
NUM_SHARES = 32
"""Into so many the ports for `lasting_port` are divided."""
_given: set[int] = set()


def address_towards(host: str) -> str:
    """This host's own address in the network in which `host` is; of loopback's several ones `LOOPBACK`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        found = probe.getsockname()[0]
    return LOOPBACK if found == "::1" or found.startswith("127.") else found


def address_for(urls: Iterable[str]) -> str:
    """The address at which all servers reach this host: loopback where all of them are here."""
    found = {address_towards(urlsplit(url).hostname or LOOPBACK) for url in urls}
    return min(found - {LOOPBACK}, default=LOOPBACK)


def free_port(host: str = LOOPBACK) -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def is_free(host: str, port: int) -> bool:
    """Whether nothing listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def lasting_port(host: str, count: int = 1, share: int = 0) -> int:
    """A free port for a server that binds it only later, minutes from now perhaps: not one of those that the system
    gives to whoever asks for any. Processes with different shares are never given the same one, and a process is given
    it twice only after all others of its share.

    Args:
        count: so many are free in a row; the first is returned.
        share: which part of the ports it is from, counted modulo `NUM_SHARES`.

    Raises:
        EngineError: there is none.
    """
    try:
        first = int(EPHEMERAL_PORTS.read_text().split()[0])
    except OSError:
        first = 32768
    every = range(LOWEST_PORT, first) if first - LOWEST_PORT > NUM_SHARES * count else range(first, 65000)
    block = len(every) // NUM_SHARES
    own = every[block * (share % NUM_SHARES) :][:block]
    taken = {port - below for port in _given for below in range(count)}
    starts = own[: block - count + 1]
    ports = [port for port in starts if port not in taken] or starts
    for port in random.sample(ports, min(len(ports), PORT_ATTEMPTS)):
        row = range(port, port + count)
        if all(is_free(host, each) for each in row):
            _given.update(row)
            return port
    raise EngineError(
        f"no free port for a server on {host}: {min(len(ports), PORT_ATTEMPTS)} from {own[0]} to {own[-1]} are taken"
    )
