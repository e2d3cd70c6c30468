"""How a file of shared memory is laid out through which one process writes and several read, all at the same time.

    header page | data …

The data is a ring: byte `p` of the stream lies at `p % size`. The header holds int64: `MAGIC`, `size`, how many bytes
have been written so far, whether the writer has given up, and for each reader how many it has read. A writer goes on
where all readers leave room; a reader takes what has been written. So what one writes the other finds in the cache,
however much passes through. The writer holds a lock (flock) of the file as long as it lives.
"""

from __future__ import annotations

import mmap

import numpy as np

MAGIC = int.from_bytes(b"colloid1", "little")
HEADER_BYTES = mmap.PAGESIZE
MAX_READERS = 256
ALIGNMENT = 64
PIECE_BYTES = 1 << 18
"""That are copied and taken into the checksum before others are told of them."""
DIGEST_BYTES = 16
_SIZE, _WRITTEN, _GIVEN_UP, _READERS = 1, 2, 3, 8


class Ring:
    """The mapped file. Positions count bytes from the beginning of the stream, not of the file."""

    def __init__(self, memory: mmap.mmap):
        raw = np.frombuffer(memory, np.uint8)
        self._header = raw[:HEADER_BYTES].view(np.int64)
        self._data = raw[HEADER_BYTES:]

    def format(self) -> None:
        """Makes it an empty one."""
        self._header[:] = 0
        self._header[_SIZE] = len(self._data)
        self._header[0] = MAGIC

    @property
    def size(self) -> int:
        """Bytes that are in it at most."""
        return len(self._data)

    @property
    def written(self) -> int:
        return int(self._header[_WRITTEN])

    @written.setter
    def written(self, position: int) -> None:
        self._header[_WRITTEN] = position

    @property
    def given_up(self) -> bool:
        """Whether nothing more will be written."""
        return bool(self._header[_GIVEN_UP])

    def give_up(self) -> None:
        self._header[_GIVEN_UP] = 1

    def read_by(self, reader: int) -> int:
        """How far a reader is."""
        return int(self._header[_READERS + reader])

    def set_read_by(self, reader: int, position: int) -> None:
        self._header[_READERS + reader] = position

    def part(self, position: int, length: int) -> np.ndarray:
        """uint8 [at most length, at most `PIECE_BYTES`]: what lies at a position, as far as it lies in one piece."""
        begin = position % len(self._data)
        return self._data[begin : begin + min(length, PIECE_BYTES)]


def is_ring(header: bytes, file_size: int) -> bool:
    """Whether a file that begins so is one, of that size."""
    numbers = np.frombuffer(header[:16], np.int64)
    return len(numbers) == 2 and numbers[0] == MAGIC and numbers[_SIZE] == file_size - HEADER_BYTES > 0


def aligned(position: int) -> int:
    """The next place at which something may begin."""
    return -(-position // ALIGNMENT) * ALIGNMENT
