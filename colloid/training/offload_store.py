"""Where the bytes of a trainer rank are kept while its memory is given back.

A rank on a CPU keeps them in a file, one with CUDA in pinned memory of the host. Both are one range of bytes, made
larger where need be and used again and again.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Protocol

import torch

from colloid.errors import ColloidError

BLOCK_BYTES = 256 << 20
"""Of pinned memory: a power of two, as torch rounds up to one."""
MOST_BYTES_A_CALL = 1 << 30
"""The system moves at most 2 GiB at once."""
_IN_MEMORY = ("tmpfs", "ramfs")
_OF_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p")


class Store(Protocol):
    """A range of bytes outside of the memory that is given back."""

    def reserve(self, size: int) -> None:
        """Makes room for so many bytes.

        Raises:
            ColloidError: there is none.
        """
        ...

    def write(self, data: torch.Tensor, offset: int) -> None:
        """Keeps uint8 [n] at byte `offset`."""
        ...

    def read(self, data: torch.Tensor, offset: int) -> None:
        """Fills uint8 [n] with what is kept at byte `offset`."""
        ...

    def close(self) -> None:
        """Gives the room back."""
        ...


class FileStore:
    """A file without a name, of which nothing is left when the process ends, however it ends.

    Args:
        places: directories; the first that is on a disk (rather than in memory) and has room is taken, those on other
            machines last.
    """

    def __init__(self, places: list[Path]):
        self._places = sorted(places, key=lambda place: file_system(place) in _OF_NETWORK)
        self._file = -1
        self._size = 0

    def reserve(self, size: int) -> None:
        if size <= self._size:
            return
        self.close()
        problems = []
        for place in self._places:
            if file_system(place) in _IN_MEMORY:
                problems.append(f"{place} is in memory")
                continue
            try:
                file, name = tempfile.mkstemp(prefix="colloid-offload-", dir=place)
                os.unlink(name)
                self._file = file
                os.posix_fallocate(file, 0, size)
            except OSError as error:
                problems.append(f"{place}: {error}")
                self.close()
                continue
            self._size = size
            return
        raise ColloidError(
            f"--offload-train has no room for {size / 2**30:.2f} GiB of the trainer's memory: {'; '.join(problems)}. "
            "Choose a disk with room by --outputs-dir or TMPDIR, or take --no-offload-train"
        )

    def write(self, data: torch.Tensor, offset: int) -> None:
        view = _memory(data)
        while view:
            written = os.pwrite(self._file, view[:MOST_BYTES_A_CALL], offset)
            view, offset = view[written:], offset + written

    def read(self, data: torch.Tensor, offset: int) -> None:
        view = _memory(data)
        while view:
            found = os.preadv(self._file, [view[:MOST_BYTES_A_CALL]], offset)
            if not found:
                raise ColloidError("the file that the trainer's memory was written to has been cut short")
            view, offset = view[found:], offset + found

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size = -1, 0


class PinnedStore:
    """Blocks of pinned memory. Not run yet on a CUDA device."""

    def __init__(self, block_bytes: int = BLOCK_BYTES):
        self._block_bytes = block_bytes
        self._blocks: list[torch.Tensor] = []

    def reserve(self, size: int) -> None:
        while len(self._blocks) * self._block_bytes < size:
            self._blocks.append(torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=True))

    def write(self, data: torch.Tensor, offset: int) -> None:
        for part, kept in self._parts(data, offset):
            kept.copy_(part)

    def read(self, data: torch.Tensor, offset: int) -> None:
        for part, kept in self._parts(data, offset):
            part.copy_(kept)

    def close(self) -> None:
        self._blocks.clear()

    def _parts(self, data: torch.Tensor, offset: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the data, each with the piece of a block that it is kept in."""
        parts, done = [], 0
        while done < len(data):
            block, begin = divmod(offset + done, self._block_bytes)
            size = min(len(data) - done, self._block_bytes - begin)
            parts.append((data[done : done + size], self._blocks[block][begin : begin + size]))
            done += size
        return parts


def _memory(data: torch.Tensor) -> memoryview:
    """Of uint8 [n] on the host. Not by `numpy()`, which leaves its mark on a storage: it can't be resized any more."""
    return memoryview((ctypes.c_char * len(data)).from_address(data.data_ptr())).cast("B")


def file_system(place: Path) -> str:
    """The type of the file system that a directory is on, as the kernel names it; empty where it doesn't say."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return ""
    found, kind = Path("/"), ""
    for line in mounts.read_text().splitlines():
        _, mounted, name, *_ = line.split(" ")
        point = Path(mounted.encode().decode("unicode_escape"))
        if place.resolve().is_relative_to(point) and len(point.parts) >= len(found.parts):
            found, kind = point, name
    return kind


def make_store(device: str, run_dir: str) -> Store:
    """Of a rank: in the run's directory where that is on a disk, else where temporary files are."""
    if device != "cpu":
        return PinnedStore()
    return FileStore([Path(run_dir), Path(tempfile.gettempdir()), Path("/var/tmp")])
