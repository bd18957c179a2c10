"""The metered device: a simulated accelerator of a given size that counts bytes of host memory in 512-byte blocks and
raises torch.OutOfMemoryError above the capacity, in any phase. Workspace inside one operation is not counted, so peaks
leave out the temporary memory of kernels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.device.base import LiveTensor, MemoryReading
from engine.device.co_tenant import CO_TENANT_VARIABLE, SharedByteCount
from engine.device.cpu import HostDevice
from engine.device.meter import Meter

if TYPE_CHECKING:
    from engine.config.schema.run import RunSpec


class MeteredDevice(HostDevice):
    """A simulated accelerator in host memory. Implements `engine.device.base.Device`."""

    kind = "metered"
    simulated = True

    def __init__(self, capacity_bytes: int, co_tenant: SharedByteCount | None = None) -> None:
        super().__init__("metered host memory (simulated)")
        self._meter = Meter(capacity_bytes, co_tenant)

    @property
    def capacity_bytes(self) -> int:
        return self._meter.tracker.capacity_bytes

    @property
    def available_bytes(self) -> int:
        return self._meter.tracker.available_bytes

    @property
    def allocations(self) -> int:
        return self._meter.tracker.allocations

    @property
    def host_allocations(self) -> int:
        return self._meter.tracker.host_allocations

    @contextmanager
    def activate(self) -> Iterator[None]:
        with _one_thread(), self._meter.active():
            yield

    def memory(self) -> MemoryReading:
        tracker = self._meter.tracker
        return MemoryReading(tracker.allocated_bytes, tracker.allocated_bytes, tracker.peak_bytes, 0)

    def reset_peak(self) -> None:
        self._meter.tracker.reset_peak()

    def host_region(self) -> AbstractContextManager[None]:
        return self._meter.host_region()

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._meter.active(), self._meter.counted_region(), torch.no_grad():
            return tensor.detach().clone()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._meter.active(), self._meter.host_region(), torch.no_grad():
            return tensor.detach().clone()

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.download(tensor)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages that torch created without an operation or in a host region. Raises torch.OutOfMemoryError."""
        self._meter.adopt(tensors)

    def fail_at(self, allocation: int | None, *then: int) -> None:
        """See AllocationTracker; for fault-injection tests."""
        self._meter.tracker.fail_at(allocation, *then)

    def fail_host_at(self, allocation: int | None) -> None:
        """See AllocationTracker; for fault-injection tests."""
        self._meter.tracker.fail_host_at(allocation)

    def largest(self, count: int) -> list[LiveTensor]:
        return self._meter.tracker.largest(count)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread, unless OMP_NUM_THREADS is set: results are then bit-identical on every machine.

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
    """Open the metered device, less what a co-tenant holds (TUNEDECK_NEIGHBOUR names its file). Raises
    EnvironmentProblem: the file does not exist, or was not written by a co-tenant."""
    shared = os.environ.get(CO_TENANT_VARIABLE)
    co_tenant = SharedByteCount.open(Path(shared)) if shared else None
    device = MeteredDevice(spec.profile.device.capacity_bytes, co_tenant)
    if shared:
        device.notices.append(f"the device is shared with the process that writes {shared} (${CO_TENANT_VARIABLE})")
    return device
