"""The protocol that every device implements, the records that its methods return, and a time limit for calls that wait
in CUDA or NCCL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from engine.device.host_copies import HostCopy, Streams


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Statistics of a device's allocator at one moment."""

    allocated_bytes: int
    """Bytes of live tensors."""
    reserved_bytes: int
    """Obtained from the driver, including free cached blocks; on devices without a cache, `allocated_bytes`."""
    peak_bytes: int
    """Largest `allocated_bytes` since the last `reset_peak()`."""
    alloc_retries: int
    """How many requests failed until the allocator had emptied its cache; a rising number means thrashing."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
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


def holders_of(reading: GpuReading) -> str:
    """The other processes on a card, with what each holds; empty if there are none."""
    others = [process for process in reading.processes if process.pid != os.getpid()]
    return ", ".join(f"pid {process.pid} ({process.name}, {_held(process)})" for process in others)


def _held(process: GpuProcess) -> str:
    return "an unknown amount" if process.used_bytes is None else f"{process.used_bytes / 2**30:.1f} GiB"


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
        """ "cuda", "cpu" or "metered"."""
        ...

    @property
    def simulated(self) -> bool:
        """Memory figures of the metered device must be labelled as simulated wherever they are shown."""
        ...

    @property
    def name(self) -> str:
        """Display name, such as "NVIDIA H200"."""
        ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the run may allocate: the profile's memory minus its reserve."""
        ...

    @property
    def available_bytes(self) -> int:
        """Bytes that the run may have allocated in total now: the capacity, or less beside other processes."""
        ...

    @property
    def supports_bfloat16(self) -> bool:
        """Whether bf16 is native."""
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

    def fit_capacity(self) -> list[str]:
        """Lower the capacity to what is left beside memory that is taken outside the allocator for the whole run.
        Returns a list with a notice for the user if it was lowered, else an empty list."""
        ...

    patience_seconds: float | None
    """How long `wait_until_idle` waits; None: without a limit."""

    def wait_until_idle(self) -> None:
        """Wait for the work queued on every stream, before freeing memory that it may still use. Raises
        StuckDeviceError after `patience_seconds`."""
        ...

    def memory(self) -> MemoryReading: ...

    def reset_peak(self) -> None:
        """Restart peak tracking from the bytes allocated now."""
        ...

    def release_cached(self) -> None:
        """Collect garbage, wait until idle, and give cached blocks back to the driver. Raises StuckDeviceError."""
        ...

    def host_region(self) -> AbstractContextManager[None]:
        """Allocations inside the block (snapshots, batches, offload) are host memory, not counted as device memory."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether operations are queued, so that the host can prepare data while the device computes."""
        ...

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to page-locked memory, for asynchronous `upload`; `tensor` itself if there is none."""
        ...

    def stop_pinning(self) -> None:
        """Use no page-locked memory from now on: `pin` returns the tensors that it is given."""
        ...

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device, without autograd history. Raises torch.OutOfMemoryError."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a device tensor to the host, without autograd history."""
        ...

    @property
    def streams(self) -> Streams:
        """The streams on which copies to the host and back run beside the computation."""
        ...

    def park(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to the host what is copied back and forth often: into page-locked memory if the device has any. Without
        autograd history, complete on return."""
        ...

    def offload(self, tensor: torch.Tensor) -> HostCopy:
        """Start to copy a device tensor to the host; the HostCopy's `fetch` copies it back. Raises UsageError if the
        tensor offloaded before this one was changed in place while it was copied."""
        ...

    def settle_offloads(self) -> None:
        """Make the device wait for offloads under way, then free the device tensors that they use. Host copies
        remain."""
        ...

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values on the host, which the caller must not change: a copy, or on a plain CPU `tensor` itself."""
        ...

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count device tensors whose allocation the device could not observe, such as memory-mapped ones."""
        ...

    def readings(self) -> list[GpuReading]:
        """NVML's readings of the run's GPUs; empty on devices that are not GPUs."""
        ...

    def largest(self, count: int) -> list[LiveTensor]:
        """Largest live allocations first; none on devices that do not track single allocations."""
        ...

    def snapshot(self) -> Any:
        """The allocator's own snapshot of its blocks, for pytorch.org/memory_viz; None if it offers none."""
        ...


def within(seconds: float | None, action: Callable[[], object], too_late: Callable[[], Exception]) -> None:
    """Call `action`, raising what it raises, and wait at most `seconds` (None: no limit). Then raises `too_late()`,
    while `action` continues in its thread until the process ends."""
    if seconds is None:
        action()
        return
    errors: list[Exception] = []

    def call() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  (of any kind: it is raised again in the thread that waits)
            errors.append(error)

    thread = threading.Thread(target=call, name="bounded call", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise too_late()
    if errors:
        raise errors[0]
