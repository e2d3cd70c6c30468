"""The filter of system calls for code of a model. Standard library only.

It forbids, for good: sockets (pairs of connected ones stay), new processes (threads stay), other programs, signals to
any other process, looking into other processes, shared memory of System V, and what has had holes: namespaces, mounts,
io_uring, BPF, keys. System calls newer than this list do not exist.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

import kernel

DENIED = {
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "truncate": (76, 45),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "io_setup": (206, 0),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "personality": (135, 92),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "setsid": (112, 157),
    "setpgid": (109, 154),
}
"""Fail with EPERM. By machine: x86_64, aarch64; None: it has no such call."""

ATTRIBUTES = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "inotify_add_watch": (254, 27),
}
"""Change a file's attributes, which Landlock does not keep from anyone. Denied where files are kept by it."""

OWN_PROCESS_ONLY = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
"""Allowed where the first argument is 0 or the process itself."""

FORBIDDEN_ARGUMENTS = {
    "prctl": ((157, 167), 0, (1,)),  # PR_SET_PDEATHSIG: it dies with its supervisor.
    "fcntl": ((72, 25), 1, (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others by way of a file.
    "ioctl": ((16, 29), 1, (0x8901, 0x8902, 0x5412)),  # FIOSETOWN, SIOCSPGRP, TIOCSTI.
}
"""Of which argument which values fail with EPERM."""

CLONE, CLONE3, CLONE_THREAD = (56, 220), 435, 0x00010000
NEWEST_KNOWN = 456
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_LOAD, _EQUAL, _GREATER, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
Instruction = tuple[int, int, int, int]


def instructions(*, attributes: bool, machine: str = kernel.MACHINE, pid: int | None = None) -> list[Instruction]:
    """The filter as BPF: code, jump if true, jump if false, operand.

    Args:
        attributes: whether files' attributes may be changed.
        pid: the process that it is for; None: this one.
    """
    column = ("x86_64", "aarch64").index(machine)
    pid = os.getpid() if pid is None else pid
    deny = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    absent = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    load_number = (_LOAD, 0, 0, _NUMBER_AT)

    def where(number: int, *body: Instruction) -> list[Instruction]:
        """A block for one system call; behind it the number is loaded again."""
        return [(_EQUAL, 0, len(body) + 1, number), *body, load_number]

    program = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, _ARCHITECTURE[machine]), (_RETURN, 0, 0, _KILL)]
    program += [load_number, (_GREATER_EQUAL, 0, 1, _X32), deny, (_GREATER, 0, 1, NEWEST_KNOWN), absent]
    denied = DENIED if attributes else DENIED | ATTRIBUTES
    for numbers in denied.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), deny]
    program += [(_EQUAL, 0, 1, CLONE3), absent]  # Its flags are behind a pointer; libraries fall back to clone.
    program += where(CLONE[column], (_LOAD, 0, 0, _ARGUMENTS_AT), (_ANY_BIT, 1, 0, CLONE_THREAD), deny)
    for numbers in OWN_PROCESS_ONLY.values():
        own = ((_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, pid))
        program += where(numbers[column], (_LOAD, 0, 0, _ARGUMENTS_AT), *own, deny)
    for numbers, argument, values in FORBIDDEN_ARGUMENTS.values():
        checks = [check for value in values for check in ((_EQUAL, 0, 1, value), deny)]
        program += where(numbers[column], (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), *checks)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def install(*, attributes: bool) -> None:
    """Puts the filter over this process and all its threads. Needs PR_SET_NO_NEW_PRIVS. Raises OSError."""
    program = instructions(attributes=attributes)
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(packed)))
    set_mode_filter, synchronise_threads = 1, 1
    kernel.syscall("seccomp", set_mode_filter, synchronise_threads, ctypes.byref(header))
