"""The plain CPU as a device. Memory is not capped, and the process's resident memory is read instead of tensor sizes.

`allocated_bytes` is the resident memory that the process gained since the device was opened, so interpreter and
libraries are left out. The operating system reports this number: it may include freed tensors, and the peak is the
largest reading taken, not a true high-water mark. For exact counts use a metered profile.

Try: `tunedeck doctor`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import torch

from engine.device.base import GpuReading, LiveTensor, MemoryReading
from engine.device.host_copies import HostCopy, NoStreams, PlainCopy, Streams

if TYPE_CHECKING:
    from engine.spec.schema.run import RunSpec


class CpuDevice:
    """The plain CPU, whose device memory is host memory. Implements `engine.device.base.Device`."""

    kind = "cpu"
    simulated = False
    supports_bfloat16 = True
    asynchronous = False
    streams: Streams = NoStreams()

    def __init__(self, capacity_bytes: int) -> None:
        self.name = "CPU"
        self.torch_device = torch.device("cpu")
        self.capacity_bytes = capacity_bytes
        self.notices: list[str] = []
        self.patience_seconds: float | None = None
        self._process = psutil.Process()
        self._baseline_bytes = self._process.memory_info().rss
        self._peak_bytes = 0
        total_bytes = psutil.virtual_memory().total
        if capacity_bytes > total_bytes:
            self.notices.append(
                f"the profile allows {capacity_bytes / 2**30:.1f} GiB, "
                f"but this machine has {total_bytes / 2**30:.1f} GiB of memory"
            )

    @property
    def available_bytes(self) -> int:
        """The capacity. Free host memory is not considered, because the operating system can swap."""
        return self.capacity_bytes

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Context manager that does nothing, because the CPU needs no preparation."""
        yield

    def synchronize(self) -> None:
        """Does nothing: operations on the CPU are not queued."""

    def fit_capacity(self) -> list[str]:
        """Return an empty list: no memory is taken outside the allocator."""
        return []

    def wait_until_idle(self) -> None:
        """Does nothing: operations on the CPU are not queued."""

    def memory(self) -> MemoryReading:
        """Return the resident memory gained since the device was opened; the peak is the largest such reading."""
        gained_bytes = max(0, self._process.memory_info().rss - self._baseline_bytes)
        self._peak_bytes = max(self._peak_bytes, gained_bytes)
        return MemoryReading(gained_bytes, gained_bytes, self._peak_bytes, 0)

    def reset_peak(self) -> None:
        """Restart peak tracking: readings taken so far no longer count."""
        self._peak_bytes = 0

    def release_cached(self) -> None:
        """Collect garbage."""
        gc.collect()

    @contextmanager
    def host_region(self) -> Iterator[None]:
        """Context manager that does nothing, because the device is host memory."""
        yield

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself: the device is host memory."""
        return tensor

    def stop_pinning(self) -> None:
        """Does nothing: `pin` returns the tensors it is given."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, which the caller may change without changing `tensor`."""
        return tensor.detach().clone()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, which the caller may change without changing `tensor`."""
        return tensor.detach().clone()

    def park(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, as `download` does."""
        return self.download(tensor)

    def offload(self, tensor: torch.Tensor) -> HostCopy:
        """Return a HostCopy whose copy is complete: operations on the CPU are not queued."""
        return PlainCopy(self.download(tensor), self.upload)

    def settle_offloads(self) -> None:
        """Does nothing: no copy is ever under way."""

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, detached, so that writing a checkpoint needs no second copy of the model."""
        return tensor.detach()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Does nothing: single tensors are not counted."""

    def readings(self) -> list[GpuReading]:
        """Return an empty list: there is no GPU."""
        return []

    def largest(self, count: int) -> list[LiveTensor]:
        """Return an empty list: single tensors are not counted."""
        return []

    def snapshot(self) -> None:
        """Return None: the C library's allocator offers no snapshot."""


def open_cpu(spec: RunSpec) -> CpuDevice:
    """Open the CPU as a device. The profile's capacity is used for planning, but not enforced."""
    return CpuDevice(spec.profile.device.capacity_bytes)
