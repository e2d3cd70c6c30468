"""What devices this machine has, found without torch."""

from __future__ import annotations

import ctypes


def num_cuda_devices() -> int:
    """CUDA devices that this process may use (`CUDA_VISIBLE_DEVICES` is respected); 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
