"""A stand-in for SGLang's CUDA kernels on a machine without CUDA: every name can be imported, and calling one raises.

SGLang on a CPU with the torch_native attention backend calls none of them.
"""

from collections.abc import Callable

__version__ = "99.0"


def __getattr__(name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **named: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel, and this SGLang was installed for a CPU")

    missing.__name__ = name
    return missing
