"""A whole checkpoint on disk whose tensors are changed in place: what deltas are made against.

Read and written in pieces through file descriptors, so that it takes no memory of the process, however large it is.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colloid.engines.checksums import CHECKSUMS_FILE
from colloid.errors import WeightSyncError

_DTYPES = {"F32": "float32", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie."""

    descriptor: int
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]


class LocalCheckpoint:
    """Holds the weights of `version`; of none where that is None."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.version: int | None = None
        self._places: dict[str, Place] = {}
        self._descriptors: list[int] = []

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def adopt(self, source: Path, version: int, keep: bool) -> None:
        """Becomes a Hugging Face directory that was written just now: moved here, or copied where it is to be kept.

        Raises:
            WeightSyncError: something that no update wrote is in the way.
        """
        self.close()
        if self.directory.exists():
            if any(self.directory.iterdir()) and not (self.directory / CHECKSUMS_FILE).exists():
                raise WeightSyncError(
                    f"{self.directory} is not empty and was not written by a weight update: choose another "
                    "--update-weight-local-checkpoint-dir"
                )
            shutil.rmtree(self.directory)
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        if keep:
            shutil.copytree(source, self.directory)
        else:
            shutil.move(source, self.directory)
        # The checksums are of this version, and would not follow the changes.
        (self.directory / CHECKSUMS_FILE).write_text("{}")
        for file in sorted(self.directory.glob("*.safetensors")):
            self._open(file)
        self.version = version

    def place(self, name: str, dtype: str, shape: tuple[int, ...]) -> Place:
        """Raises WeightSyncError where the checkpoint has no such tensor."""
        place = self._places.get(name)
        if place is None or (place.dtype, place.shape) != (dtype, shape):
            found = "none" if place is None else f"{place.dtype} {list(place.shape)}"
            raise WeightSyncError(f"{name} is {dtype} {list(shape)}, the version before had {found}")
        return place

    def read(self, place: Place, begin: int, size: int) -> np.ndarray:
        """uint8 [size], from byte `begin` of the tensor on."""
        data = os.pread(place.descriptor, size, place.offset + begin)
        if len(data) != size:
            raise WeightSyncError(f"{self.directory} has been cut short")
        return np.frombuffer(data, np.uint8)

    def write(self, place: Place, begin: int, data: np.ndarray) -> None:
        """The counterpart of `read`."""
        view = memoryview(np.ascontiguousarray(data)).cast("B")
        while view:
            written = os.pwrite(place.descriptor, view, place.offset + begin)
            view, begin = view[written:], begin + written

    def close(self) -> None:
        """Holds no version any more."""
        self.version = None
        self._places = {}
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _open(self, file: Path) -> None:
        descriptor = os.open(file, os.O_RDWR)
        self._descriptors.append(descriptor)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header = json.loads(os.pread(descriptor, length, 8))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
                self._places[name] = Place(descriptor, 8 + length + begin, end - begin, dtype, tuple(entry["shape"]))
