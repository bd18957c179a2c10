"""The protocol that every device implements, and the records it returns. No behaviour lives here.

Try: `python -c "from engine.device.base import MemoryReading; print(MemoryReading(1, 2, 3, 0))"`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # NVML readings must work where torch does not import
    import torch


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes that the device's allocator holds."""

    allocated_bytes: int
    """Held by live tensors."""
    reserved_bytes: int
    """Taken from the driver, free cached blocks included. Equals `allocated_bytes` on devices without a cache."""
    peak_bytes: int
    """Largest `allocated_bytes` since the last `reset_peak()`."""
    alloc_retries: int
    """Requests for which the allocator had to empty its cache first; a rising number means thrashing."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process that holds memory on a GPU."""

    pid: int
    used_bytes: int | None
    """None where the driver does not report it (containers, WSL)."""
    name: str


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU as NVML reports it. A field is None where the driver does not answer."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    utilisation_percent: int | None
    temperature_celsius: int | None
    power_watts: float | None
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One live allocation, described by the first tensor that was created on it."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    key: int
    """Address of its storage object (`_cdata`), which identifies the parameter or buffer that it belongs to."""


class Device(Protocol):
    """The memory that a run's tensors live in. The engine allocates only inside `activate()`."""

    @property
    def kind(self) -> str:
        """cuda, cpu or metered."""
        ...

    @property
    def simulated(self) -> bool:
        """True for the metered device; every display of its figures says that they are simulated."""
        ...

    @property
    def name(self) -> str:
        """Display name, such as "NVIDIA H200"."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """The torch device that tensors are created on."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes the run may hold: the profile's memory minus its reserve."""
        ...

    @property
    def available_bytes(self) -> int:
        """Bytes the run could hold now: the capacity, or less while other processes hold memory of this device."""
        ...

    @property
    def supports_bfloat16(self) -> bool:
        """Whether bf16 arithmetic is native here."""
        ...

    @property
    def notices(self) -> list[str]:
        """Messages to show the user before the run starts."""
        ...

    def activate(self) -> AbstractContextManager[None]:
        """Use this device in the calling thread, and in threads started inside the block. May be nested."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued work has run, so that asynchronous errors are raised here."""
        ...

    def memory(self) -> MemoryReading:
        """The allocator's current figures."""
        ...

    def reset_peak(self) -> None:
        """Restart peak tracking from the bytes allocated now."""
        ...

    def release_cached(self) -> None:
        """Collect garbage and give cached blocks back to the driver."""
        ...

    def host_region(self) -> AbstractContextManager[None]:
        """Do not count allocations inside the block: they are host memory (snapshots, batches, offload)."""
        ...

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the device, without its autograd history."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a device tensor on the host, without its autograd history."""
        ...

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor with the same values, for reading only: a copy, or on the plain CPU the tensor itself."""
        ...

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count device tensors whose allocation the device could not observe, such as a memory-mapped file."""
        ...

    def readings(self) -> list[GpuReading]:
        """NVML's readings of the run's GPUs; empty on devices that are not GPUs."""
        ...

    def largest(self, count: int) -> list[LiveTensor]:
        """The largest live allocations; empty on devices that do not track single allocations."""
        ...

    def snapshot(self) -> Any:
        """The allocator's own snapshot of its blocks, for pytorch.org/memory_viz; None where it cannot take one."""
        ...
