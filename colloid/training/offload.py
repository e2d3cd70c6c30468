"""Gives a trainer rank's memory back to the system while the engines generate, and takes it again, bit by bit the same.

    release:  storages whose content is kept are copied to a store; then no storage has memory
    resume:   all have memory again; contents are copied back, gradients are zero

On a CPU a storage stays where it is, and its pages are given back to the system; on CUDA it is resized to nothing.
Either way every view of it (Megatron's buffers, parameters, main parameters of bf16, gradients) stays what it was.
While the memory is released, `read` gives a tensor's values from the store: so weights are sent without being in memory
as a whole.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from colloid.training.offload_store import Store

ALIGNMENT = 4096
"""Bytes: of each storage's offset in the store."""


@dataclass(frozen=True)
class Held:
    """What of a rank's memory can be given back.

    Attributes:
        kept: tensors whose values are needed again.
        zeroed: tensors that are written anew before they are read, as gradients are.
    """

    kept: Iterable[torch.Tensor]
    zeroed: Iterable[torch.Tensor]


@dataclass(frozen=True)
class _Place:
    """A storage, its size, and where its bytes are kept; `offset` is None for one that comes back as zeros."""

    storage: torch.UntypedStorage
    size: int
    offset: int | None


class Offload:
    """The memory of one rank.

    Args:
        held: what it consists of; asked anew each time, as an optimizer has states only after its first step.
        device: storages elsewhere are left alone (a reference's weights, which are on the host with CUDA).
        in_place: whether storages stay where they are (or are resized); None: on a CPU.
    """

    def __init__(self, held: Callable[[], Held], store: Store, device: torch.device, *, in_place: bool | None = None):
        self._held, self._store, self._device = held, store, device
        self._in_place = device.type == "cpu" if in_place is None else in_place
        self._places: dict[int, _Place] = {}
        self._waiting: list[Callable[[], None]] = []
        self.released = False

    def release(self) -> int:
        """Gives everything back; returns the bytes. Nothing happens where it is released already.

        Raises:
            ColloidError: there is no room for what is kept.
        """
        if self.released:
            return 0
        held = self._held()
        kept, zeroed = self._storages(held.kept), self._storages(held.zeroed)
        places, end = {}, 0
        for key, storage in kept.items():
            places[key] = _Place(storage, storage.nbytes(), end)
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        for key, storage in zeroed.items():
            places.setdefault(key, _Place(storage, storage.nbytes(), None))
        self._store.reserve(end)
        for place in places.values():
            if place.offset is not None:
                self._store.write(_bytes_of(place.storage), place.offset)
        self._places, self.released = places, True  # before: were one not to be given back, all can be resumed
        for place in places.values():
            self._vacate(place)
        give_back(self._device)
        return sum(place.size for place in places.values())

    def resume(self) -> None:
        """Takes everything back. Nothing happens where it is not released."""
        if not self.released:
            return
        for place in self._places.values():
            if not self._in_place:
                place.storage.resize_(place.size)
                if place.offset is None:
                    _bytes_of(place.storage).zero_()
            if place.offset is not None:
                self._store.read(_bytes_of(place.storage), place.offset)
        self._places, self.released = {}, False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values, also while its memory is released: then a copy, on its device."""
        place = self._places.get(tensor.untyped_storage()._cdata)
        if place is None:
            return tensor.detach()
        assert tensor.is_contiguous() and place.offset is not None, "only whole tensors that are kept can be read"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._store.read(_bytes_of(copy.untyped_storage()), place.offset + tensor.storage_offset() * tensor.itemsize)
        return copy

    def when_resumed(self, call: Callable[[], None]) -> None:
        """Calls it now, or after the next `resume`."""
        if self.released:
            self._waiting.append(call)
        else:
            call()

    def close(self) -> None:
        """Gives the store's room back. What is released then is lost."""
        self._store.close()

    def _vacate(self, place: _Place) -> None:
        if not self._in_place:
            place.storage.resize_(0)
            return
        if place.offset is None:
            data = _bytes_of(place.storage)  # the system leaves a part of the first and of the last page
            data[: mmap.PAGESIZE].zero_()
            data[-mmap.PAGESIZE :].zero_()
        drop_pages(place.storage.data_ptr(), place.size)

    def _storages(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        """Each storage once, by its address, which is its own as long as it is referred to."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes():
                found[storage._cdata] = storage
        return found


def give_back(device: torch.device) -> None:
    """Freed memory to the system, rather than to the allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # of glibc
        libc.malloc_trim(0)


def drop_pages(address: int, size: int) -> None:
    """Gives the whole pages of a range of this process's own memory back to the system. They read as 0 from now on, and
    take memory again as they are written.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and end > begin:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), f"{end - begin} bytes of memory could not be given back to the system")


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [n]: a view of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
