"""The tensors of the key-value cache: pages of `page_size` positions, keys transposed.

Memory is reserved for the whole capacity as address space and becomes resident as pages are first written; that is
how a small model with a large limit stays small. Keys and values are zeroed or overwritten when a page is handed out:
what lies behind a sequence's end is always finite, so that masked positions weigh exactly nothing.

Shapes: `L` layers, `N` pages, `K` key-value heads, `D` and `E` the dimensions of a key and of a
value, `S` page_size, `T` tokens.
"""

import mmap
import sys

import torch
import torch.nn.functional as F

from colloid.engines.embedded.model_config import ModelConfig

_MAP_NORESERVE = 0x4000


class KVCache:
    """keys [L, N, K, D, S], values [L, N, K, S, E]; views and copies by page index."""

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype):
        self.page_size = page_size
        shape = (config.num_layers, num_pages, config.num_kv_heads)
        self._reserved: list[mmap.mmap] = []
        self.keys = self._lazily_zero((*shape, config.key_dim, page_size), dtype)
        self.values = self._lazily_zero((*shape, page_size, config.value_dim), dtype)

    def give_back(self) -> None:
        """No page is resident any more: all are zero, and become resident anew as they are written."""
        if sys.platform == "linux":
            for buffer in self._reserved:
                buffer.madvise(mmap.MADV_DONTNEED)

    def copy_page(self, source: int, destination: int) -> None:
        if source != destination:
            self.keys[:, destination] = self.keys[:, source]
            self.values[:, destination] = self.values[:, source]

    def clear_from(self, page: int, offset: int) -> None:
        """Zeroes a page's positions from `offset` on."""
        self.keys[:, page, :, :, offset:] = 0
        self.values[:, page, :, offset:] = 0

    def write_prompt(self, layer: int, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k [T, K, D], v [T, K, E] into whole pages [ceil(T / S)], from their first position on; the rest is zeroed."""
        size = self.page_size
        padding = (0, 0, 0, 0, 0, len(pages) * size - len(k))
        k_pages, v_pages = (F.pad(x, padding).view(len(pages), size, *x.shape[1:]) for x in (k, v))
        self.keys[layer].index_copy_(0, pages, k_pages.permute(0, 2, 3, 1).contiguous())
        self.values[layer].index_copy_(0, pages, v_pages.transpose(1, 2).contiguous())

    def write_tokens(
        self, layer: int, pages: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """One position a sequence: k [T, K, D], v [T, K, E] to pages [T] at offsets [T]."""
        self.keys[layer][pages, :, :, offsets] = k
        self.values[layer][pages, :, offsets] = v

    def read(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k [K, T, D], v [K, T, E] of whole pages in order."""
        k = self.keys[layer].index_select(0, pages)
        v = self.values[layer].index_select(0, pages)
        return k.permute(1, 0, 3, 2).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)

    def _lazily_zero(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros whose memory becomes resident page by page, as it is written."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if sys.platform == "linux":
            buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        else:
            buffer = mmap.mmap(-1, size)
        self._reserved.append(buffer)
        return torch.frombuffer(buffer, dtype=dtype).view(shape)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.num_layers * config.num_kv_heads * (config.key_dim + config.value_dim) * dtype.itemsize
