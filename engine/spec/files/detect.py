"""Detects the device of this machine for a new hardware profile: a GPU with NVML, else the CPU and host memory.

Try: `tunedeck profiles new mine --detect`
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from engine.spec.files.text import visible

CUDA_RESERVE_GIB = 1.0
"""Memory of the CUDA context and libraries, rounded up."""


def detect_device() -> tuple[dict[str, Any], str, str]:
    """Detect the first GPU, or the CPU if NVML finds no GPU; returns a profile's [device] table, its title and its
    notes."""
    return _detect_gpu() or _detect_cpu()


def host_memory_bytes() -> int:
    """All host memory of this machine, as the operating system reports it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def count_devices() -> int:
    """The number of GPUs that NVML finds; 1 if it finds none, for the CPU."""
    if not _has_nvml():
        return 1
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 1
    try:
        return max(1, int(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _has_nvml() -> bool:
    """Whether the NVIDIA driver's library can be loaded. Checked first, because importing pynvml takes as long as the
    rest of the detection."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _detect_gpu() -> tuple[dict[str, Any], str, str] | None:
    if not _has_nvml():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        count = pynvml.nvmlDeviceGetCount()
        return _gpu_facts(pynvml, count) if count else None
    finally:
        pynvml.nvmlShutdown()


def _gpu_facts(pynvml: Any, count: int) -> tuple[dict[str, Any], str, str]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    total_bytes, offered_bytes = _memory(pynvml, handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    name, driver = visible(pynvml.nvmlDeviceGetName(handle)), visible(pynvml.nvmlSystemGetDriverVersion())
    device = {
        "kind": "cuda",
        "memory_gib": offered_bytes * 100 // 2**30 / 100,
        "reserve_gib": CUDA_RESERVE_GIB,
        "host_memory_gib": host_memory_bytes() * 100 // 2**30 / 100,
        "compute_capability": float(f"{major}.{minor}"),
        "allocator": "expandable_segments:True",
    }
    others = (
        f" This machine has {count}: raise device.count to use them." if count > 1 else ""
    )
    kept = (total_bytes - offered_bytes) >> 20
    notes = f"memory_gib: NVML's total of {total_bytes >> 20} MiB less {kept} MiB that driver {driver} keeps.{others}"
    return device, name, notes


def _memory(pynvml: Any, handle: Any) -> tuple[int, int]:
    """Return NVML's total memory, and the part of it that programs can use: the driver reserves some hundreds of MiB.

    Drivers before 510 do not report their reserve; then both numbers are the total.
    """
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        total_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        return total_bytes, total_bytes
    return int(memory.total), int(memory.total - memory.reserved)


def _detect_cpu() -> tuple[dict[str, Any], str, str]:
    memory_gib = host_memory_bytes() * 100 // 2**30 / 100
    device = {
        "kind": "cpu",
        "memory_gib": memory_gib,
        "reserve_gib": round(memory_gib * 0.2, 2),
        "host_memory_gib": memory_gib,
    }
    notes = (
        "No NVIDIA driver was found. memory_gib: the host's total; a fifth is left to everything else on the machine."
    )
    return device, f"This machine's CPU, {os.cpu_count()} cores", notes
