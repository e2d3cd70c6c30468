"""Bounds what oneDNN keeps: a compiled kernel for every shape that it has seen.

Batches and caches of an engine have hundreds of shapes, a kernel takes about 0.5 MB, and both of its caches (its own,
and torch's) hold 1024 of them: 500 mixed requests to a tiny model left 670 MB behind, and 107 MB with 128 kernels.
"""

import os

NUM_KERNELS = 256


def bound_kernel_caches() -> None:
    """Has to come before the first product; what the user has set stays."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(NUM_KERNELS))
