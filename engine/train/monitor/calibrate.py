"""At the end of a run on CUDA, measures memory that plans cannot compute, for later plans on this machine.

The size of the CUDA context is what the driver counts for this process minus what torch reserved; if NVML does not
report this count, nothing is recorded. cuBLAS takes its workspace from torch's allocator, so it is measured by freeing
it.

Runs on CUDA only; `engine.budget.calibration` reads what is recorded here.
"""

from __future__ import annotations

import os

import torch

from engine.budget.calibration import CalibrationKey, Residuals, is_expandable, record
from engine.device.base import Device
from engine.device.nvml import driver_version
from engine.spec.schema.profile import Profile
from engine.train.monitor.journal import Journal


def calibrate(device: Device, profile: Profile, ranks: int, peak_bytes: int, journal: Journal) -> None:
    """Record this run's `Residuals` (CUDA context, workspace, fragmentation). Does nothing without CUDA or without the
    driver's count."""
    driver = driver_version()
    if device.kind != "cuda" or not peak_bytes or driver is None:
        return
    found = _residuals(device, peak_bytes)
    if found is None:
        return
    properties = torch.cuda.get_device_properties(device.torch_device)
    setting = CalibrationKey(
        gpu=properties.name,
        compute_capability=float(f"{properties.major}.{properties.minor}"),
        memory_gib=properties.total_memory / 2**30,
        driver=driver,
        torch=torch.__version__,
        ranks=ranks,
        expandable=is_expandable(profile.device.allocator),
    )
    try:
        record(setting, found)
    except OSError as error:
        journal.warn("not_calibrated", f"what this run showed of the device could not be kept: {error}")


def _residuals(device: Device, peak_bytes: int) -> Residuals | None:
    used_bytes = _used_by_this_process(device)
    if used_bytes is None:
        return None
    held = device.memory()
    torch._C._cuda_clearCublasWorkspaces()
    workspace_bytes = held.allocated_bytes - device.memory().allocated_bytes
    return Residuals(
        context_bytes=max(0, used_bytes - held.reserved_bytes),
        workspace_bytes=workspace_bytes,
        fragmented_share=round(max(0.0, held.reserved_bytes / peak_bytes - 1.0), 4),
    )


def _used_by_this_process(device: Device) -> int | None:
    """Bytes that the driver counts for this process; None if the driver does not tell, as inside containers that hide
    process ids."""
    for reading in device.readings():
        for process in reading.processes:
            if process.pid == os.getpid() and process.used_bytes is not None:
                return process.used_bytes
    return None
