"""At the end of a run on CUDA, measures memory that plans cannot compute, for later plans on this machine.

The size of the CUDA context is what the driver counts for this process minus what torch reserved; if NVML does not
report this count, nothing is recorded. cuBLAS takes its workspace from torch's allocator, so it is measured by freeing
it. Fragmentation is measured in the probe, which runs the most expensive micro-batch with caches released before:
later, torch's allocator also holds memory that evaluation, saving and micro-batches of other shapes have left, which it
would give back if memory ran short.

Runs on CUDA only; `engine.budget.calibration` reads what is recorded here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from engine.budget.calibration import SMALL_RUN, CalibrationKey, Residuals, is_expandable, record
from engine.device.allocator import allocator_settings
from engine.device.base import Device
from engine.device.nvml import driver_version
from engine.train.monitor.journal import Journal


@dataclass(frozen=True)
class ProbeMemory:
    """Memory of the most expensive micro-batch, run with caches released before."""

    peak_bytes: int
    """Most bytes allocated at once."""
    reserved_bytes: int
    """Bytes that torch's allocator had taken from the driver when the micro-batch ended. It gives none back while
    memory suffices, so this is also their peak."""

    def fragmented_share(self, card_bytes: int) -> float | None:
        """Reserved divided by allocated bytes, minus 1, at least 0. None if the run used too little of the card's
        `card_bytes` for this to be representative."""
        if self.peak_bytes < SMALL_RUN * card_bytes:
            return None
        return round(max(0.0, self.reserved_bytes / self.peak_bytes - 1.0), 4)


def calibrate(device: Device, ranks: int, probe: ProbeMemory | None, journal: Journal) -> None:
    """Record this run's `Residuals` (CUDA context, workspace, fragmentation) for later plans on this machine; `ranks`
    is the run's number of ranks. Does nothing without CUDA, without a probe, or if the driver does not count memory by
    process. If the record cannot be written, a warning is."""
    driver = driver_version()
    if device.kind != "cuda" or probe is None or driver is None:
        return
    properties = torch.cuda.get_device_properties(device.torch_device)
    found = _residuals(device, probe.fragmented_share(properties.total_memory))
    if found is None:
        return
    setting = CalibrationKey(
        gpu=properties.name,
        compute_capability=float(f"{properties.major}.{properties.minor}"),
        memory_gib=properties.total_memory / 2**30,
        driver=driver,
        torch=torch.__version__,
        ranks=ranks,
        expandable=is_expandable(allocator_settings()),
    )
    try:
        record(setting, found)
    except OSError as error:
        journal.warn("not_calibrated", f"what this run showed of the device could not be kept: {error}")


def _residuals(device: Device, fragmented_share: float | None) -> Residuals | None:
    used_bytes = _used_by_this_process(device)
    if used_bytes is None:
        return None
    held = device.memory()
    torch._C._cuda_clearCublasWorkspaces()
    workspace_bytes = held.allocated_bytes - device.memory().allocated_bytes
    return Residuals(
        context_bytes=max(0, used_bytes - held.reserved_bytes),
        workspace_bytes=workspace_bytes,
        fragmented_share=fragmented_share,
    )


def _used_by_this_process(device: Device) -> int | None:
    """Bytes that the driver counts for this process; None if the driver does not tell, as inside containers that hide
    process ids."""
    for reading in device.readings():
        for process in reading.processes:
            if process.pid == os.getpid() and process.used_bytes is not None:
                return process.used_bytes
    return None
