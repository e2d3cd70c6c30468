"""What keeps the files and processes of a host from model-written code: namespaces, or Landlock. Standard library only.

| | namespaces | Landlock |
|---|---|---|
| files | a root of its own: the interpreter read-only, an empty `/tmp` in memory | only the interpreter to read, and a directory on disk |
| network | a network of its own with nothing in it, and no sockets | no sockets, no TCP |
| processes | sees none but its own | may signal none but its own |
| needs | unprivileged user namespaces, or CAP_SYS_ADMIN | Linux 5.13 with Landlock |
"""  # noqa: E501

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

import kernel

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SCRATCH = "/tmp"
_FIRST_UID, _UIDS = 61184, 4336
"""Of system users that are made up for the time of a service: no account has one."""


def enter_namespaces() -> bool:
    """New namespaces for processes, network and IPC; whether in a user namespace. The next child is the first process.

    Raises:
        OSError: the host does not let this user.
    """
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        try:
            kernel.unshare(flags)
            return False
        except PermissionError:
            pass  # root without CAP_SYS_ADMIN, as in a container: as any other user.
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def enter_root(readable: Sequence[str], disk: int, *, user_namespace: bool, uid_seed: int) -> None:
    """A root directory of this process's own, where it then has no rights beyond those of any user.

    Args:
        readable: files and directories of the host, shown read-only at their own places.
        disk: bytes that `/tmp` holds at most.
        uid_seed: of sandboxes at the same time, each has another one.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    held = [(path, os.open(path, os.O_PATH | os.O_NOFOLLOW)) for path in _outermost(readable)]
    held += [(path, os.open(path, os.O_PATH)) for path in DEVICES]
    kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=4096,mode=755")
    os.makedirs(f"{SCRATCH}{SCRATCH}", exist_ok=True)
    options = f"size={disk},nr_inodes=4096,mode=1777"
    kernel.mount("tmpfs", f"{SCRATCH}{SCRATCH}", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for path, descriptor in held:
        _show(path, descriptor)
    os.chdir(SCRATCH)
    kernel.syscall("pivot_root", b".", b".")
    kernel.unmount(".", kernel.MNT_DETACH)
    os.chdir("/")
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | _READ_ONLY)
    os.chdir(SCRATCH)
    if not user_namespace:
        uid = _FIRST_UID + uid_seed % _UIDS
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.drop_capabilities()


_READ_ONLY = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV


def _outermost(paths: Sequence[str]) -> list[str]:
    """Those that exist and are not inside another one; of a symbolic link, the link and what it names."""
    found: set[str] = set()
    for path in paths:
        if os.path.lexists(path):
            found |= {os.path.abspath(path), os.path.realpath(path)}
    found = {path for path in found if os.path.exists(path)}
    return sorted(path for path in found if not any(path.startswith(f"{other}/") for other in found))


def _show(path: str, descriptor: int) -> None:
    """Binds what a descriptor holds to its place in the new root."""
    target, source = f"{SCRATCH}{path}", f"/proc/self/fd/{descriptor}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    link = os.readlink("", dir_fd=descriptor) if _is_link(descriptor) else None
    if link is not None:
        os.symlink(link, target)
    elif os.path.isdir(source):
        os.mkdir(target)
        kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
        _seal(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        kernel.mount(source, target, None, kernel.MS_BIND)
        if path not in DEVICES:
            _seal(target)
    os.close(descriptor)


def _is_link(descriptor: int) -> bool:
    return (os.fstat(descriptor).st_mode & 0o170000) == 0o120000


def _seal(target: str) -> None:
    """Read-only, with all that is mounted below."""
    recursive, here = 0x8000, -100
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0))
    try:
        kernel.syscall("mount_setattr", here, os.fsencode(target), recursive, attributes, 32)
    except OSError:  # Before Linux 5.12.
        kernel.mount("none", target, None, kernel.MS_REMOUNT | kernel.MS_BIND | _READ_ONLY)


_READ_FILE, _READ_DIRECTORY, _WRITE_FILE, _REMOVE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 32, 256, 1 << 14


def landlock_version() -> int:
    """Of its interface. Raises OSError where the kernel has none."""
    return kernel.syscall("landlock_create_ruleset", None, 0, 1)


def enter_landlock(readable: Sequence[str], directory: str) -> None:
    """From here on this process reads what is `readable`, and has files of its own in `directory`. Needs
    PR_SET_NO_NEW_PRIVS.

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = landlock_version()
    files = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    handled = [files] + ([3] if version >= 4 else []) + ([3] if version >= 6 else [])
    attributes = ctypes.create_string_buffer(struct.pack(f"{len(handled)}Q", *handled))
    ruleset = kernel.syscall("landlock_create_ruleset", attributes, 8 * len(handled), 0)

    def allow(path: str, access: int) -> None:
        descriptor = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            access &= _READ_FILE | _WRITE_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access & files, descriptor))
        kernel.syscall("landlock_add_rule", ruleset, 1, rule, 0)
        os.close(descriptor)

    for path in _outermost(readable):
        allow(path, _READ_FILE | _READ_DIRECTORY)
    for path in DEVICES:
        allow(path, _READ_FILE | _WRITE_FILE)
    allow(directory, _READ_FILE | _READ_DIRECTORY | _WRITE_FILE | _REMOVE_FILE | _MAKE_FILE | _TRUNCATE)
    os.chdir(directory)
    kernel.drop_capabilities()
    kernel.syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)
