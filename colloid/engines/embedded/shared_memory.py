"""Tensors in a shared-memory file that belongs to the user that runs the engine; nothing is unpickled."""

import mmap
import os
import stat
import tempfile
from pathlib import Path

import xxhash

from colloid.engines.contract import BadRequest, WeightUpdateBucket


def map_bucket(bucket: WeightUpdateBucket) -> mmap.mmap:
    """The first `size` bytes of a bucket's file, mapped privately; unmapped when nothing refers to it any more.

    Raises:
        BadRequest: the file is not where it may be, is someone else's, or does not hold what the sender wrote.
    """
    path, size = Path(bucket.path), bucket.size
    allowed = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    if path.parent not in allowed:
        raise BadRequest(f"shared memory must lie in {' or '.join(map(str, sorted(allowed)))}, not at {path}")
    descriptor = open_own(path)
    try:
        length = os.fstat(descriptor).st_size
        if length < size:
            raise BadRequest(f"{path} has {length} bytes, the sender said {size}")
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    checksum = xxhash.xxh3_128_hexdigest(memory)
    if checksum != bucket.checksum:
        raise BadRequest(f"{bucket.path}: the checksum is {checksum}, the sender's is {bucket.checksum}")
    return memory


def open_own(path: Path) -> int:
    """A descriptor of a regular file of this user, for reading. Links are not followed. Raises BadRequest."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise BadRequest(f"cannot open {path}: {error}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise BadRequest(f"{path} is not a regular file of the user that runs the engine")
    return descriptor
