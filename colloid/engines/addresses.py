"""Addresses and ports of this host: where servers listen, and how others reach them. Nothing here sends anything."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"


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
