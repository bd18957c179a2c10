"""The protocol that every device implements, and the records that its methods return. Nothing is implemented here.

Try: `python -c "from engine.device.base import MemoryReading; print(MemoryReading(1, 2, 3, 0))"`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # NVML readings must work where torch does not import
    import torch

    from engine.device.host_copies import HostCopy, Streams


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory statistics of a device's allocator at one moment."""

    allocated_bytes: int
    """Bytes of live tensors."""
    reserved_bytes: int
    """Bytes obtained from the driver, including free cached blocks; on devices without a cache, `allocated_bytes`."""
    peak_bytes: int
    """Largest `allocated_bytes` since the last `reset_peak()`."""
    alloc_retries: int
    """How many requests failed until the allocator had emptied its cache; a rising number means thrashing."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process that holds memory on a GPU."""

    pid: int
    used_bytes: int | None
    """Bytes that the process uses on the GPU; None where the driver does not report them (containers, WSL)."""
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
    """Address of the storage object (`_cdata`), by which the parameter or buffer on it can be found."""


class Device(Protocol):
    """The device on which a run's tensors are allocated. The engine allocates only inside `activate()`."""

    @property
    def kind(self) -> str:
        """The kind of device: "cuda", "cpu" or "metered"."""
        ...

    @property
    def simulated(self) -> bool:
        """True for the metered device, whose memory figures must be labelled as simulated wherever they are shown."""
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
        """Bytes that the run may allocate: the profile's memory minus its reserve."""
        ...

    @property
    def available_bytes(self) -> int:
        """Bytes that the run may have allocated in total now: the capacity, or less while other processes use memory of
        this device."""
        ...

    @property
    def supports_bfloat16(self) -> bool:
        """Whether the device computes bf16 natively."""
        ...

    @property
    def notices(self) -> list[str]:
        """Messages to show the user before the run starts."""
        ...

    def activate(self) -> AbstractContextManager[None]:
        """Context manager: use this device in the calling thread, and in threads started inside the block. May be
        nested."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued work has run, so that asynchronous errors are raised here."""
        ...

    def fit_capacity(self) -> list[str]:
        """Lower the capacity to what is left beside memory that is taken outside the allocator for the whole run.
        Returns a list with a notice for the user if it was lowered, else an empty list."""
        ...

    patience_seconds: float | None
    """How long `wait_until_idle` waits; None: without a limit."""

    def wait_until_idle(self) -> None:
        """Wait until the work queued on every stream is done, before memory that it may still use is freed.

        Raises:
            StuckDeviceError: the work is not done after `patience_seconds`.
        """
        ...

    def memory(self) -> MemoryReading:
        """Return the allocator's current statistics."""
        ...

    def reset_peak(self) -> None:
        """Restart peak tracking from the bytes allocated now."""
        ...

    def release_cached(self) -> None:
        """Collect garbage, wait until the device is idle, and give cached blocks back to the driver. Raises
        StuckDeviceError."""
        ...

    def host_region(self) -> AbstractContextManager[None]:
        """Context manager: allocations inside the block (snapshots, batches, offload) are host memory and do not count
        as device memory."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether operations are queued, so that the host can prepare data while the device computes."""
        ...

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor in page-locked memory, from which `upload` is asynchronous. On devices without
        page-locked memory, or if none is left, return `tensor` itself."""
        ...

    def stop_pinning(self) -> None:
        """Use no page-locked memory from now on: `pin` returns the tensors that it is given."""
        ...

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device. The copy has no autograd history. Raises torch.OutOfMemoryError if it does
        not fit."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a device tensor to the host. The copy has no autograd history."""
        ...

    @property
    def streams(self) -> Streams:
        """The streams on which copies to the host and back run beside the computation."""
        ...

    def park(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a device tensor to the host, to be copied back and forth often: into page-locked memory if the device
        has any, else as `download` does. The copy has no autograd history and is complete on return."""
        ...

    def offload(self, tensor: torch.Tensor) -> HostCopy:
        """Start to copy a device tensor to the host, asynchronously; returns a HostCopy, whose `fetch` copies it back.
        Raises UsageError if the tensor of the offload before this one was changed in place while it was copied."""
        ...

    def settle_offloads(self) -> None:
        """End the offloads under way: make the device wait for their copies, then free the device tensors that they
        read or write. The host copies remain."""
        ...

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host tensor with the same values, which the caller must not change: a copy, or on a plain CPU
        `tensor` itself."""
        ...

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count device tensors whose allocation the device could not observe, such as memory-mapped ones."""
        ...

    def readings(self) -> list[GpuReading]:
        """Return NVML's readings of the run's GPUs; an empty list on devices that are not GPUs."""
        ...

    def largest(self, count: int) -> list[LiveTensor]:
        """Return the `count` largest live allocations; none on devices that do not track single allocations."""
        ...

    def snapshot(self) -> Any:
        """Return the allocator's own snapshot of its blocks, for pytorch.org/memory_viz; None if it offers none."""
        ...
