"""The end of a run on CUDA measures what torch did not allocate, for the next plan on this machine.

The context is what the driver counts for this process beside what torch reserved; without NVML's word nothing is
recorded. cuBLAS' workspace is taken from torch's allocator, so it is told by giving it back.

Runs on CUDA only; what it records is read by `engine.budget.calibration`.
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
    """Record this run's residuals, where the device has any and the driver tells them."""
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
    """What the driver counts; None where it does not say, as inside containers that hide process ids."""
    for reading in device.readings():
        for process in reading.processes:
            if process.pid == os.getpid() and process.used_bytes is not None:
                return process.used_bytes
    return None
