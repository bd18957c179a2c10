"""The plain CPU as a device, with uncapped memory; only a container's limit lowers its capacity. `allocated_bytes` is
the resident memory gained since opening: it may include freed tensors, and the peak is the largest reading, not a
high-water mark (a metered profile has one)."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import torch

from engine.config.files.cgroups import host_memory_bytes, memory_limit_bytes
from engine.device.base import GpuReading, LiveTensor, MemoryReading
from engine.device.host_copies import HostCopy, NoStreams, PlainCopy, Streams

if TYPE_CHECKING:
    from engine.config.schema.run import RunSpec


ENGINE_BYTES = 512 * 2**20
"""Of a control group's limit, beyond which the kernel kills: left to the libraries that an engine has loaded."""


class HostDevice:
    """What a device whose memory is host memory does in its own way, or not at all: nothing is queued, and no copy runs
    beside the computation."""

    supports_bfloat16 = True
    asynchronous = False
    streams: Streams = NoStreams()

    def __init__(self, name: str) -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        self.notices: list[str] = []
        self.patience_seconds: float | None = None

    def synchronize(self) -> None:
        """Does nothing: operations on the CPU are not queued."""

    def fit_capacity(self) -> list[str]:
        return []

    def wait_until_idle(self) -> None:
        """Does nothing: operations on the CPU are not queued."""

    def release_cached(self) -> None:
        gc.collect()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def stop_pinning(self) -> None:
        """Does nothing: `pin` returns the tensors it is given."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, which the caller may change without changing `tensor`."""
        return tensor.detach().clone()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, which the caller may change without changing `tensor`."""
        return tensor.detach().clone()

    def park(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.download(tensor)

    def offload(self, tensor: torch.Tensor) -> HostCopy:
        return PlainCopy(self.download(tensor), self.upload)

    def settle_offloads(self) -> None:
        """Does nothing: no copy is ever under way."""

    def readings(self) -> list[GpuReading]:
        return []

    def snapshot(self) -> None:
        """Return None: the C library's allocator offers no snapshot."""


class CpuDevice(HostDevice):
    """The plain CPU, whose device memory is host memory. Implements `engine.device.base.Device`."""

    kind = "cpu"
    simulated = False

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__("CPU")
        self.capacity_bytes = capacity_bytes
        self._process = psutil.Process()
        self._baseline_bytes = self._process.memory_info().rss
        self._peak_bytes = 0
        total_bytes, limit_bytes = host_memory_bytes(), memory_limit_bytes()
        if capacity_bytes > total_bytes:
            owner = "this container" if limit_bytes == total_bytes else "this machine"
            self.notices.append(
                f"the profile allows {capacity_bytes / 2**30:.1f} GiB, "
                f"but {owner} has {total_bytes / 2**30:.1f} GiB of memory"
            )
        if limit_bytes is not None:
            self.capacity_bytes = min(capacity_bytes, max(limit_bytes - ENGINE_BYTES, limit_bytes // 4))

    @property
    def available_bytes(self) -> int:
        """The capacity, whatever host memory is free: the operating system can swap."""
        return self.capacity_bytes

    @contextmanager
    def activate(self) -> Iterator[None]:
        yield

    def memory(self) -> MemoryReading:
        gained_bytes = max(0, self._process.memory_info().rss - self._baseline_bytes)
        self._peak_bytes = max(self._peak_bytes, gained_bytes)
        return MemoryReading(gained_bytes, gained_bytes, self._peak_bytes, 0)

    def reset_peak(self) -> None:
        self._peak_bytes = 0

    @contextmanager
    def host_region(self) -> Iterator[None]:
        yield

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, detached, so that writing a checkpoint needs no second copy of the model."""
        return tensor.detach()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Does nothing: single tensors are not counted."""

    def largest(self, count: int) -> list[LiveTensor]:
        return []


def open_cpu(spec: RunSpec) -> CpuDevice:
    """The profile's capacity is used for planning, but not enforced."""
    return CpuDevice(spec.profile.device.capacity_bytes)
