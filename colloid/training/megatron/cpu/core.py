"""Importing megatron.core on a CPU, and the few names inside it that are wrong without Transformer Engine and CUDA."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch


def install() -> None:
    """Imports megatron.core, gives it a fused Adam and mends two functions of its MoE code (0.16.1)."""
    with _import_quickly():
        import megatron.core.optimizer as optimizer
        import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
        import megatron.core.transformer.moe.moe_utils as moe_utils
        import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    from colloid.training.megatron.cpu.adam import FusedAdam

    optimizer.Adam = distributed_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed_optimizer.HAVE_APEX_OR_TE = distributed_optimizer.USING_APEX_OPTIMIZER = True
    if not hasattr(moe_utils, "te_general_gemm"):
        # Asked for, before it is found to be absent, where the router has a dtype of its own.
        moe_utils.te_general_gemm = None
    # The originals convert to numpy only what lies on a CUDA device.
    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu = _to_host


@contextlib.contextmanager
def _import_quickly() -> Iterator[None]:
    """Megatron compiles small functions as it is imported, and tells that Transformer Engine and Apex are absent.

    Loading the compiler takes as long as all the rest, and on a CPU the functions are as fast without.
    """
    original = torch.compile
    torch.compile = lambda function=None, **_options: function or (lambda given: given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = original


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
