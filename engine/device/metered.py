"""The metered device: a simulated accelerator of a given size that counts bytes of host memory.

Every storage that torch creates inside `activate()` is counted in 512-byte blocks, and refused with
torch.OutOfMemoryError above the capacity, in any phase: forward, backward, optimizer step, evaluation. Workspace inside
one operation is not counted, so peaks leave out the temporary memory of kernels. `engine.device.meter` observes
allocations, `engine.device.allocation_tracker` counts them.

Try: `tunedeck train -p demo -r demo`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.device.base import GpuReading, LiveTensor, MemoryReading
from engine.device.co_tenant import CO_TENANT_VARIABLE, SharedByteCount
from engine.device.host_copies import HostCopy, NoStreams, PlainCopy, Streams
from engine.device.meter import Meter

if TYPE_CHECKING:
    from engine.spec.schema.run import RunSpec


class MeteredDevice:
    """A simulated accelerator in host memory. Implements `engine.device.base.Device`."""

    kind = "metered"
    simulated = True
    supports_bfloat16 = True
    asynchronous = False
    streams: Streams = NoStreams()

    def __init__(self, capacity_bytes: int, co_tenant: SharedByteCount | None = None) -> None:
        """Create a device of `capacity_bytes`, from which the bytes that `co_tenant` currently holds are subtracted."""
        self.name = "metered host memory (simulated)"
        self.torch_device = torch.device("cpu")
        self.notices: list[str] = []
        self.patience_seconds: float | None = None
        self._meter = Meter(capacity_bytes, co_tenant)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that may be allocated at the same time while no co-tenant holds memory."""
        return self._meter.tracker.capacity_bytes

    @property
    def available_bytes(self) -> int:
        """The capacity minus the bytes held by the co-tenant."""
        return self._meter.tracker.available_bytes

    @property
    def allocations(self) -> int:
        """Allocations requested so far, including refused ones."""
        return self._meter.tracker.allocations

    @property
    def host_allocations(self) -> int:
        """Host allocations requested in host regions so far, including refused ones."""
        return self._meter.tracker.host_allocations

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Context manager: count allocations of this thread and of threads started inside the block."""
        with _one_thread(), self._meter.active():
            yield

    def synchronize(self) -> None:
        """Does nothing: operations on the CPU are not queued."""

    def fit_capacity(self) -> list[str]:
        """Return an empty list: no memory is taken outside the allocator."""
        return []

    def wait_until_idle(self) -> None:
        """Does nothing: operations on the CPU are not queued."""

    def memory(self) -> MemoryReading:
        """Return the counted allocated and peak bytes; reserved equals allocated, because there is no cache."""
        tracker = self._meter.tracker
        return MemoryReading(tracker.allocated_bytes, tracker.allocated_bytes, tracker.peak_bytes, 0)

    def reset_peak(self) -> None:
        """Restart peak tracking from the bytes allocated now."""
        self._meter.tracker.reset_peak()

    def release_cached(self) -> None:
        """Collect garbage; there is no cache to empty."""
        gc.collect()

    def host_region(self) -> AbstractContextManager[None]:
        """Context manager: storages created inside the block are host memory; they are not counted, not even after the
        block."""
        return self._meter.host_region()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself: the device is host memory."""
        return tensor

    def stop_pinning(self) -> None:
        """Does nothing: `pin` returns the tensors it is given."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that is counted. Raises torch.OutOfMemoryError if the copy does not fit."""
        with self._meter.active(), self._meter.counted_region(), torch.no_grad():
            return tensor.detach().clone()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that is not counted."""
        with self._meter.active(), self._meter.host_region(), torch.no_grad():
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
        """Return a copy that is not counted, as `download` does."""
        return self.download(tensor)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors` that are not counted yet, because torch created them without an operation or
        in a host region. Raises torch.OutOfMemoryError if they do not fit."""
        self._meter.adopt(tensors)

    def readings(self) -> list[GpuReading]:
        """Return an empty list: there is no GPU."""
        return []

    def fail_at(self, allocation: int | None, *then: int) -> None:
        """Plan to refuse one allocation, the `allocation`-th from now (1 is the next). Each number in `then` plans
        another refusal, counted from the previous refusal. None cancels all. For fault-injection tests."""
        self._meter.tracker.fail_at(allocation, *then)

    def fail_host_at(self, allocation: int | None) -> None:
        """Plan to refuse one host allocation, the `allocation`-th from now; None cancels the plan. For fault-injection
        tests."""
        self._meter.tracker.fail_host_at(allocation)

    def largest(self, count: int) -> list[LiveTensor]:
        """Return the `count` largest counted allocations, largest first."""
        return self._meter.tracker.largest(count)

    def snapshot(self) -> None:
        """Return None: `largest` already lists single allocations."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context manager: compute on one thread, unless OMP_NUM_THREADS is set, so that results are bit-identical on every
    machine.

    Small models gain little from a second thread: on two idle cores, demo steps become a tenth faster, and with other
    busy processes two to four times slower, because each thread waits for the other to be scheduled.
    """
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def open_metered(spec: RunSpec) -> MeteredDevice:
    """Open the metered device with the profile's capacity, minus the bytes that a co-tenant holds.

    The environment variable TUNEDECK_NEIGHBOUR names the file that the co-tenant writes; if it is not set, there is no
    co-tenant.

    Raises EnvironmentProblem: the file does not exist, or was not written by a co-tenant.
    """
    shared = os.environ.get(CO_TENANT_VARIABLE)
    co_tenant = SharedByteCount.open(Path(shared)) if shared else None
    device = MeteredDevice(spec.profile.device.capacity_bytes, co_tenant)
    if shared:
        device.notices.append(f"the device is shared with the co-tenant that writes {shared} (${CO_TENANT_VARIABLE})")
    return device
