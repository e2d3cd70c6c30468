"""`--rollout-external-engine-addrs`: engines that run already, named one by one or in a file that is read again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from colloid.config import sglang
from colloid.errors import ConfigError

if TYPE_CHECKING:
    from colloid.config.args import Args

OPTION = "--rollout-external-engine-addrs"
HERE = ("localhost", "::1")


def is_external(args: Args) -> bool:
    """Whether the run's engines run already."""
    return bool(args.rollout_external_engine_addrs)


def address_file(values: Sequence[str]) -> str | None:
    """The path of `@path`, where the option names a file."""
    found = [value for value in values if value.startswith("@")]
    if found and len(values) > 1:
        raise ConfigError(f"{OPTION} {' '.join(values)}: a file, {found[0]}, stands alone; write all addresses into it")
    return os.path.abspath(found[0][1:]) if found else None


def external_addresses(values: Sequence[str]) -> tuple[str, ...]:
    """`http://host:port` of each engine.

    Args:
        values: addresses, `host:port`; or one `@path` of a file with one address a line, where `#` begins a comment.

    Raises:
        ConfigError: one is no address, or is there twice; the file cannot be read, or has none.
    """
    path = address_file(values)
    where = OPTION if path is None else f"{OPTION} @{path}"
    if path is not None:
        try:
            with open(path, encoding="utf-8") as file:
                values = [line.partition("#")[0].strip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}") from error
        values = [value for value in values if value]
        if not values:
            raise ConfigError(f"{where} names no engine: write one host:port a line")
    found = tuple(_address(value, where) for value in values)
    doubled = sorted({address for address in found if found.count(address) > 1})
    if doubled:
        raise ConfigError(f"{where}: {', '.join(doubled)} is there more than once")
    return found


def _address(text: str, where: str) -> str:
    match = re.fullmatch(r"(?:http://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d+)/?", text)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigError(f"{where}: {text!r} is no address: give host:port, e.g. 10.0.0.7:30000")
    return f"http://{match[1]}:{match[2]}"


def is_here(address: str) -> bool:
    """Whether an address is of this host's loopback."""
    host = urlsplit(address).hostname or ""
    return host in HERE or host.startswith("127.")


def _alone(args: Args) -> str | None:
    """What says how engines are started has no use where they run already."""
    if not is_external(args):
        return None
    refused = {"colocate", "rollout_num_gpus", "rollout_num_gpus_per_engine", "rollout_engine_python"}
    refused |= {f"sglang_{name}" for name in sglang.given(args, "sglang")}
    given = sorted(refused & args.given)
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        return f"{names}: the engines of {OPTION} run already, with their own options; leave it out"
    return None


def _shared_memory(args: Args) -> str | None:
    if not is_external(args) or args.update_weight_transport != "tensor":
        return None
    elsewhere = [address for address in external_addresses(args.rollout_external_engine_addrs) if not is_here(address)]
    if elsewhere:
        other = "nccl" if args.device == "cuda" else "gloo"
        return (
            f"--update-weight-transport tensor: shared memory does not reach {', '.join(elsewhere)}. Take {other}, or "
            "disk with a directory that all hosts see"
        )
    return None


RULES: tuple[Callable[[Args], str | None], ...] = (_alone, _shared_memory)
