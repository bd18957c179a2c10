"""What every device offers, and the readings it returns. No behaviour lives here.

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
    """What the allocator holds, in bytes."""

    allocated_bytes: int
    """Held by live tensors."""
    reserved_bytes: int
    """Taken from the driver, free blocks of the cache included. Equals allocated where there is no cache."""
    peak_bytes: int
    """Largest `allocated_bytes` since the last `reset_peak()`."""
    alloc_retries: int
    """How often the allocator had to empty its cache to serve a request; a rising figure means thrashing."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process that holds memory on a GPU."""

    pid: int
    used_bytes: int | None
    """None where the driver does not say (containers, WSL)."""
    name: str


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU as NVML sees it. None where the driver does not answer."""

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
    """One live allocation, described by the first tensor that was seen on it."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    key: int
    """Address of its storage object (`_cdata`), by which a tensor that is known by name is found among these."""


class Device(Protocol):
    """Where a run's tensors live. Everything the engine allocates happens inside `activate()`."""

    @property
    def kind(self) -> str:
        """cuda, cpu or metered."""
        ...

    @property
    def simulated(self) -> bool:
        """True for the metered device; whatever shows its figures says so."""
        ...

    @property
    def name(self) -> str:
        """A name for people, such as "NVIDIA H200"."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """What tensors are created on."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """What the run may hold: the profile's memory minus its reserve."""
        ...

    @property
    def available_bytes(self) -> int:
        """What the run could hold right now: the capacity, or less while others hold memory of the same device."""
        ...

    @property
    def supports_bfloat16(self) -> bool:
        """Whether bf16 arithmetic is native here."""
        ...

    @property
    def notices(self) -> list[str]:
        """Sentences the user should see before the run starts."""
        ...

    def activate(self) -> AbstractContextManager[None]:
        """Make this the device in force in the calling thread and in threads started meanwhile. May be re-entered."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued has run, so that asynchronous errors surface here."""
        ...

    def memory(self) -> MemoryReading:
        """The allocator's figures now."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        ...

    def release_cached(self) -> None:
        """Collect garbage and give cached blocks back to the driver."""
        ...

    def host_region(self) -> AbstractContextManager[None]:
        """Allocations inside are host memory: snapshots, batches, offload."""
        ...

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor in page-locked memory where that speeds up copies, else the tensor itself."""
        ...

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the device, without its autograd history."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a device tensor on the host, without its autograd history."""
        ...

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor of the same values, to be read and dropped: the tensor itself where host and device are one."""
        ...

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of device tensors that came about where the device could not see (a memory-mapped file)."""
        ...

    def rng_state(self) -> dict[str, torch.Tensor]:
        """States of every random generator the run draws from, as uint8 host tensors."""
        ...

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what `rng_state` returned."""
        ...

    def readings(self) -> list[GpuReading]:
        """What NVML says about the run's GPUs; empty where there are none."""
        ...

    def largest(self, count: int) -> list[LiveTensor]:
        """The largest live allocations; empty where the device does not know them one by one."""
        ...

    def snapshot(self) -> Any:
        """The allocator's own picture of its blocks, for pytorch.org/memory_viz; None where there is none."""
        ...
