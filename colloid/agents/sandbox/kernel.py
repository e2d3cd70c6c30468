"""System calls that Python has no function for. Standard library only: the runner imports it without colloid."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

MACHINE = platform.machine()
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(MACHINE)
_LIBC = ctypes.CDLL(None, use_errno=True)

NUMBERS = {
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "seccomp": (317, 277),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
"""By machine: x86_64, aarch64."""

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    *(1, 2, 4, 8, 32, 4096, 16384),
    1 << 18,
)
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38


def supported() -> bool:
    """Whether the numbers of this machine's system calls are known."""
    return _COLUMN is not None


def syscall(name: str, *arguments: Any) -> int:
    """Calls by name. Raises OSError with the name."""
    if _COLUMN is None:
        raise OSError(f"the system calls of {MACHINE} are not known to the sandbox")
    return _checked(name, _LIBC.syscall(NUMBERS[name][_COLUMN], *arguments))


def unshare(flags: int) -> None:
    """New namespaces for this process (a PID namespace: for its children)."""
    _checked("unshare", _LIBC.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _checked(f"mount {target}", _LIBC.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]))


def unmount(target: str, flags: int) -> None:
    """umount2(2)."""
    _checked(f"umount {target}", _LIBC.umount2(os.fsencode(target), flags))


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    _checked(f"prctl {option}", _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def drop_capabilities() -> None:
    """Gives up all of them, for good once PR_SET_NO_NEW_PRIVS is set."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    syscall("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _checked(what: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
