"""Utilisation of this host's GPUs, as NVIDIA's management library (NVML) tells it. Tested against a stand-in of
`pynvml`; not run on a GPU yet.

NVML's own averages: utilisation is the share of the last sample period (1/6 s to 1 s) in which a kernel ran.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

logger = logging.getLogger(__name__)

MIB, GIB = 1024**2, 1024**3


class Devices:
    """All GPUs of this host that NVML knows, whatever `CUDA_VISIBLE_DEVICES` says.

    Args:
        nvml: a module with the functions of `pynvml`.
    """

    def __init__(self, nvml: Any):
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    def __len__(self) -> int:
        return len(self._handles)

    def sample(self) -> dict[str, dict[str, float]]:
        """By index: `utilization` and `memory_utilization` (percent of the time), `memory_gib` and `memory_percent`
        (in use), `power_watts` and `temperature` (degrees Celsius). What a device does not tell is left out.
        """
        return {str(index): self._of(handle) for index, handle in enumerate(self._handles)}

    def close(self) -> None:
        """Gives the library back."""
        self._nvml.nvmlShutdown()

    def _of(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        values: dict[str, float] = {}
        rates = self._told(nvml.nvmlDeviceGetUtilizationRates, handle)  # not of a device that is cut up (MIG)
        if rates is not None:
            values |= {"utilization": float(rates.gpu), "memory_utilization": float(rates.memory)}
        memory = self._told(nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            values |= {"memory_gib": memory.used / GIB, "memory_percent": 100 * memory.used / memory.total}
        power = self._told(nvml.nvmlDeviceGetPowerUsage, handle)
        if power is not None:
            values["power_watts"] = power / 1000
        temperature = self._told(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        if temperature is not None:
            values["temperature"] = float(temperature)
        return values

    def _told(self, ask: Any, *arguments: Any) -> Any:
        """What the library answers; None where this device has no such value."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError as error:
            logger.debug("%s: %s", ask.__name__, error)
            return None


def open_devices(expected: bool) -> Devices | None:
    """This host's GPUs; None where there is no driver, no GPU, or no `pynvml`.

    Args:
        expected: whether the run uses GPUs, so that a missing library is worth a warning.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        if expected:
            logger.warning("the GPUs' utilisation is not measured: pip install 'colloid[gpu]' (nvidia-ml-py)")
        return None
    try:
        devices = Devices(nvml)
    except nvml.NVMLError as error:
        (logger.warning if expected else logger.debug)("the GPUs' utilisation is not measured: NVML: %s", error)
        return None
    return devices if len(devices) else None
