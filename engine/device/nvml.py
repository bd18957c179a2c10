"""Reads GPUs through NVML, which counts memory that torch cannot see: CUDA contexts, other processes and the driver's
own. Never raises on a machine without a GPU. Values that a driver, container or MIG slice does not report are None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import psutil
import pynvml

from engine.device.base import GpuProcess, GpuReading

Value = TypeVar("Value")


def driver_version() -> str | None:
    """None if there is no driver, or it does not say."""
    found = _query(pynvml.nvmlSystemGetDriverVersion) if _started() else None
    return None if found is None else _text(found)


def read_gpus(uuids: list[str] | None = None) -> list[GpuReading]:
    """Read GPUs in NVML's order, or that of `uuids`. Those that cannot be read are left out; empty without a driver."""
    if not _started():
        return []
    if uuids is None:
        handles = [_by_index(index) for index in range(_query(pynvml.nvmlDeviceGetCount) or 0)]
    else:
        handles = [_by_uuid(uuid) for uuid in uuids]
    readings = [_read(handle) for handle in handles if handle is not None]
    return [reading for reading in readings if reading is not None]


def _started() -> bool:
    """NVML allows repeated initialisation, and never shutting it down costs nothing."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def _by_index(index: int) -> Any:
    return _query(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))


def _by_uuid(uuid: str) -> Any:
    return _query(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))


def _query(call: Callable[[], Value]) -> Value | None:
    """None if the driver, card or container does not support the call."""
    try:
        return call()
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _read(handle: Any) -> GpuReading | None:
    memory = _query(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    index = _query(lambda: pynvml.nvmlDeviceGetIndex(handle))
    if memory is None or index is None:
        return None  # the GPU does not respond, or this process may not query it
    milliwatts = _query(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    utilisation = _query(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    return GpuReading(
        index=index,
        name=_text(_query(lambda: pynvml.nvmlDeviceGetName(handle)) or "unnamed GPU"),
        uuid=_text(_query(lambda: pynvml.nvmlDeviceGetUUID(handle)) or ""),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        utilisation_percent=None if utilisation is None else int(utilisation.gpu),
        temperature_celsius=_query(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        power_watts=None if milliwatts is None else milliwatts / 1000,
        processes=tuple(_processes(handle)),
    )


def _processes(handle: Any) -> list[GpuProcess]:
    running = _query(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    return [GpuProcess(process.pid, process.usedGpuMemory, _process_name(process.pid)) for process in running]


def _process_name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "not visible from here"
