"""Reads who holds memory on the devices of a run. A stage starts only when no process of an earlier stage holds any.

Try: `python -c "from engine.stages.device_use import *; from engine.spec.load import resolve;
print(read_device_use(resolve('24gb', 'lora').spec))"`
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.device.base import GpuProcess, GpuReading
from engine.device.co_tenant import CO_TENANT_VARIABLE, SharedByteCount
from engine.device.nvml import read_gpus
from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.spec.schema.run import RunSpec

LONGEST_WAIT_SECONDS = 30.0
"""How long a driver may take to release the memory of a process that has ended."""

POLL_SECONDS = 0.25


@dataclass(frozen=True)
class DeviceUse:
    """Memory in use on the devices of a run, over all processes."""

    used_bytes: int
    processes: tuple[GpuProcess, ...] = ()


def read_device_use(spec: RunSpec) -> DeviceUse:
    """Read who holds memory on the run's devices. On a metered device that is the co-tenant; on a CPU nobody."""
    if spec.profile.device.kind == "metered":
        held = os.environ.get(CO_TENANT_VARIABLE)
        return DeviceUse(SharedByteCount.open(Path(held)).held_bytes if held else 0)
    if spec.profile.device.kind != "cuda":
        return DeviceUse(0)
    readings = _selected(spec)
    processes = tuple(process for reading in readings for process in reading.processes)
    return DeviceUse(sum(reading.used_bytes for reading in readings), processes)


def _selected(spec: RunSpec) -> list[GpuReading]:
    """The GPUs that CUDA will number as the run's devices, by --devices and $CUDA_VISIBLE_DEVICES."""
    readings = read_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = {str(reading.index): reading for reading in readings} | {reading.uuid: reading for reading in readings}
        readings = [named[word.strip()] for word in visible.split(",") if word.strip() in named]
    wanted = spec.limits.devices or range(spec.profile.device.count)
    return [readings[index] for index in wanted if index < len(readings)]


def wait_until_released(spec: RunSpec, run: RunDirectory) -> DeviceUse:
    """Wait until no process of this run holds memory on the run's devices; returns the use by all other processes.

    Raises EnvironmentProblem, which names the process ids, if one still does after LONGEST_WAIT_SECONDS.
    """
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while True:
        use = read_device_use(spec)
        own = [process for process in use.processes if _belongs_to(process, run)]
        if not own:
            return use
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in own)
            raise EnvironmentProblem(
                f"processes of an earlier stage still hold memory on the device: {pids}",
                expected="a device without them before the next stage",
                fix=f"end them with: kill -9 {pids.replace(',', '')}, then: tunedeck resume {run.name}",
            )
        time.sleep(POLL_SECONDS)


def _belongs_to(process: GpuProcess, run: RunDirectory) -> bool:
    """Whether a process works on a stage of this run: its command line names a folder inside the run."""
    try:
        return any(word.startswith(f"{run.path}{os.sep}") for word in psutil.Process(process.pid).cmdline())
    except psutil.Error:
        return False  # gone, or another user's
