"""What a machine without CUDA lacks for Megatron-Core: the answers of `torch.cuda`, ragged collectives, fused Adam.

Everything that is replaced is replaced here, and only where CUDA is absent; the rest of the trainer cannot tell.
"""

import os
import sys

import torch

_installed = False


def install() -> None:
    """Makes megatron.core importable and runnable on CPU. Does nothing where CUDA is present, or a second time.

    Must run before megatron.core is first imported.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise ImportError("import colloid.training.megatron before megatron.core: it makes it work without CUDA")
    _installed = True
    # For what Megatron compiles after it was imported.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    from colloid.training.megatron.cpu import collectives, cuda_api, factories

    cuda_api.install()
    factories.install()
    collectives.install()
    from colloid.training.megatron.cpu import core

    core.install()


def installed() -> bool:
    """Whether this process trains on CPU through this package."""
    return _installed
