"""The energy of this process's GPU, as the driver counts it (NVML). Without such a driver the process reports none.

The driver counts millijoules since it was loaded (``nvmlDeviceGetTotalEnergyConsumption``: Volta and newer), for the whole device. Where
several processes compute on a device, each counts an equal share of the energy since its last reading.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any, Protocol

import torch

log = logging.getLogger("fleet.rank.energy")


class Device(Protocol):
    """A device that counts its energy; ``Nvml`` is one."""

    def millijoules(self) -> int:
        """The energy since some time in the past. Raises OSError when it cannot be read."""

    def processes(self) -> int:
        """How many processes compute on the device now. Raises OSError when it cannot be read."""


class Nvml:
    """The device that PyTorch computes on, found by its UUID: NVML's numbers ignore ``CUDA_VISIBLE_DEVICES``. Raises OSError."""

    def __init__(self) -> None:
        try:
            import pynvml  # of nvidia-ml-py, which is no dependency
        except ImportError as error:
            raise OSError("nvidia-ml-py is not installed") from error
        self._nvml: Any = pynvml
        self._handle = self._asked(self._open)

    def _open(self) -> Any:
        self._nvml.nvmlInit()
        return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")

    def _asked(self, ask: Any, *args: Any) -> Any:
        try:
            return ask(*args)
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def millijoules(self) -> int:
        """The energy since the driver was loaded."""
        return int(self._asked(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle))

    def processes(self) -> int:
        """The number of processes that the driver lists."""
        return len(self._asked(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle))


class Energy:
    """Sums the share of this process. ``read`` gives (joules, seconds in which they were counted), both 0 without a device."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._before: tuple[int, float] | None = None
        self._joules = self._metered_s = 0.0

    def begin(self, device: Device, now_s: float) -> None:
        """Count from now on."""
        self._device, self._before = device, (device.millijoules(), now_s)

    def read(self, now_s: float) -> tuple[float, float]:
        """The totals up to now. After an error the device is not read again, and the totals stay."""
        if self._device is not None and self._before is not None:
            try:
                millijoules, sharing = self._device.millijoules(), max(1, self._device.processes())
            except OSError as error:
                log.warning("the GPU's energy is not counted any more: %s", error)
                self._device = None
            else:
                before, since_s = self._before
                self._joules += max(0, millijoules - before) / 1000.0 / sharing
                self._metered_s += now_s - since_s
                self._before = (millijoules, now_s)
        return self._joules, self._metered_s


def metered() -> tuple[float, float]:
    """(joules, seconds) of this process so far. Counting begins at the first call after the process has used a GPU."""
    return _of_this_process().read(time.monotonic()) if torch.cuda.is_initialized() else (0.0, 0.0)


@functools.cache
def _of_this_process() -> Energy:
    meter = Energy()
    try:
        meter.begin(Nvml(), time.monotonic())
    except OSError as error:
        log.info("the GPU's energy is not counted: %s", error)
    return meter
