"""Engines that run already: what they are, whether they fit the run, and the file that lists them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colloid.engines.control import EngineAddress, EngineControl
from colloid.errors import ConfigError, EngineError

FACTS_TIMEOUT = 10.0
SETTLED_SECONDS = 1.0
"""A file that was written more recently may not be whole yet."""


@dataclass(frozen=True)
class Expected:
    """What an engine must be.

    Attributes:
        model_type, vocab_size, architectures: of the run's model, as its config.json has them; None: not compared.
        kind: `embedded` or `sglang`; None: either.
        deterministic: whether its answers must not depend on its batch.
        transport: by which it gets its weights.
        disk_dirs: from where, with `disk`.
    """

    model_type: str | None = None
    vocab_size: int | None = None
    architectures: tuple[str, ...] | None = None
    kind: str | None = None
    deterministic: bool = False
    transport: str = "gloo"
    disk_dirs: tuple[str, ...] = ()


def find_engine(address: str, api_key: str | None, expected: Expected, timeout: float = FACTS_TIMEOUT) -> EngineAddress:
    """The engine at an address.

    Raises:
        EngineError: nothing answers there.
        ConfigError: what answers is no engine, asks for another key, or does not fit the run.
    """
    control = EngineControl(address, api_key, timeout)
    try:
        server, model = control.get("/server_info"), control.get("/model_info")
    except EngineError as error:
        if "status 401" in str(error) or "status 403" in str(error):
            raise ConfigError(
                f"the engine {address} asks for another API key: set COLLOID_API_KEY to the one it was started with"
            ) from error
        if error.__cause__ is None:
            raise ConfigError(f"{address} is no engine with SGLang's API: {error}") from error
        raise
    if "model_path" not in model:
        raise ConfigError(f"{address} is no engine with SGLang's API: its /model_info has no model_path")
    kind = "embedded" if server.get("engine") == "embedded" else "sglang"
    problems = [text for text in _problems(kind, server, model, expected) if text]
    if problems:
        raise ConfigError(f"the engine {address} does not fit the run: {'; '.join(problems)}")
    return EngineAddress(address, kind)


def check_engines(addresses: Sequence[str], api_key: str | None, expected: Expected) -> str:
    """Asks all engines before a run starts; returns their kind.

    Raises:
        ConfigError: names each that does not answer or does not fit, and says why; or they are not of one kind.
    """
    kinds: dict[str, list[str]] = {}
    problems = []
    for address in addresses:
        try:
            kinds.setdefault(find_engine(address, api_key, expected).kind, []).append(address)
        except EngineError as error:
            problems.append(f"the engine {address} cannot be reached: {error}")
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("--rollout-external-engine-addrs: " + "\n       ".join(problems))
    if len(kinds) > 1:
        listed = "; ".join(f"{kind}: {', '.join(found)}" for kind, found in sorted(kinds.items()))
        raise ConfigError(f"--rollout-external-engine-addrs: engines of one kind only, as they take weights: {listed}")
    return next(iter(kinds))


def _problems(kind: str, server: dict[str, Any], model: dict[str, Any], expected: Expected) -> list[str | None]:
    facts = {**server, **model}
    architectures = facts.get("architectures")
    return [
        _other("model of type", facts.get("model_type"), expected.model_type),
        _other("vocabulary of", facts.get("vocab_size"), expected.vocab_size),
        _other("architecture", tuple(architectures) if architectures else None, expected.architectures),
        f"it is of kind {kind}, the others are {expected.kind}" if expected.kind not in (None, kind) else None,
        "--deterministic needs it started with --enable-deterministic-inference"
        if expected.deterministic and not server.get("enable_deterministic_inference")
        else None,
        _transport(kind, server, expected),
    ]


def _other(what: str, held: Any, wanted: Any) -> str | None:
    return (
        f"it has a {what} {held!r}, --hf-checkpoint {wanted!r}"
        if None not in (held, wanted) and held != wanted
        else None
    )


def _transport(kind: str, server: dict[str, Any], expected: Expected) -> str | None:
    if expected.transport == "tensor" and kind == "sglang":
        return (
            "--update-weight-transport tensor hands SGLang pickles, which go only to servers that the run has started: "
            "take gloo, nccl or disk"
        )
    if expected.transport == "nccl" and kind == "embedded":
        return "the embedded engine computes on the CPU: take --update-weight-transport gloo, or disk"
    allowed = server.get("weights_dirs")
    if expected.transport == "disk" and kind == "embedded" and allowed is not None:
        places = [Path(place).resolve() for place in allowed]
        missing = [
            each for each in expected.disk_dirs if not any(Path(each).resolve().is_relative_to(p) for p in places)
        ]
        if missing:
            return f"it may not read weights from {', '.join(missing)}: start it with --weights-dir {missing[0]}"
    return None


class AddressFile:
    """A list of addresses in a file, looked at again and again.

    Args:
        read: the addresses in it now; raises ConfigError.
        clock: seconds, as the file system's.
    """

    def __init__(self, path: Path, read: Callable[[], Sequence[str]], clock: Callable[[], float]):
        self._path, self._read, self._clock = path, read, clock
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> Sequence[str] | None:
        """The addresses, at first and once after each change; None: as before, or not settled yet.

        Raises:
            ConfigError: the file cannot be used; said once for each change.
        """
        stamp = self._stamp()
        if stamp is None or stamp == self._seen or self._clock() - stamp[0] / 1e9 < SETTLED_SECONDS:
            return None
        self._seen = stamp
        return self._read()

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:  # between two versions of it
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
