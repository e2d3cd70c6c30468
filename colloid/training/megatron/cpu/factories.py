"""Tensors that Megatron asks for on "cuda" are made on the CPU.

A `TorchFunctionMode` could not do this: it is off inside backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._device import _device_constructors

# fmt: off
FACTORIES = [
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "rand",
    "rand_like", "randint", "randn", "randn_like", "tensor", "zeros", "zeros_like",
]
# fmt: on
METHODS = ["new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"]


def install() -> None:
    """Wraps torch's tensor factories and the conversions of `torch.Tensor`."""
    # `with torch.device(…)` knows factories by identity, and collects them once: before they are wrapped.
    _device_constructors()
    for name in FACTORIES:
        _wrap_factory(torch, name)
    for name in METHODS:
        _wrap_factory(torch.Tensor, name)
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if any(_is_cuda(value) for value in args):
            args = tuple("cpu" if _is_cuda(value) else value for value in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original_type(self, *args, **kwargs)
        # Megatron compares the names with those of CUDA tensors.
        return "torch.cuda." + original_type(self).removeprefix("torch.")

    torch.Tensor.to = to
    torch.Tensor.type = type_
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self
    torch.Tensor.record_stream = lambda self, _stream: None


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    # A bare number is a CUDA device's; True and False are `non_blocking` and `copy`.
    return isinstance(device, int) and not isinstance(device, bool)


def _wrap_factory(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    setattr(owner, name, factory)
