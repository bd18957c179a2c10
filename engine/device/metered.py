"""The metered device: host memory counted as if it were an accelerator of a given size. Simulated, and says so.

Every storage torch makes inside `activate()` is counted in 512-byte blocks and refused above the capacity with
torch.OutOfMemoryError, wherever that happens: forward, backward, optimizer step, evaluation. Workspace inside one
operation is not counted, so its peaks are those of tensors, not of kernels. How it sees: `engine.device.meter`.

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
from engine.device.co_tenant import NEIGHBOUR_VARIABLE, SharedCount
from engine.device.meter import Meter

if TYPE_CHECKING:
    from engine.spec.schema.run import RunSpec


class MeteredDevice:
    """A simulated accelerator in host memory. See `engine.device.base.Device`."""

    kind = "metered"
    simulated = True
    supports_bfloat16 = True

    def __init__(self, capacity_bytes: int, neighbour: SharedCount | None = None) -> None:
        """A device of `capacity_bytes`, less what `neighbour` counts at each moment."""
        self.name = "metered host memory (simulated)"
        self.torch_device = torch.device("cpu")
        self.notices: list[str] = []
        self._meter = Meter(capacity_bytes, neighbour)

    @property
    def capacity_bytes(self) -> int:
        """What may be allocated at once."""
        return self._meter.ledger.capacity_bytes

    @property
    def available_bytes(self) -> int:
        """The capacity, less what a neighbour holds of it."""
        return self._meter.ledger.available_bytes

    @property
    def allocations(self) -> int:
        """Requests so far, refused ones included."""
        return self._meter.ledger.allocations

    @property
    def host_allocations(self) -> int:
        """Host allocations made in host regions so far, refused ones included."""
        return self._meter.ledger.host_allocations

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Count in this thread and in threads started meanwhile."""
        with _one_thread(), self._meter.active():
            yield

    def synchronize(self) -> None:
        """Nothing is queued here."""

    def memory(self) -> MemoryReading:
        """Allocated and peak as counted; there is no cache, so reserved equals allocated."""
        ledger = self._meter.ledger
        return MemoryReading(ledger.allocated_bytes, ledger.allocated_bytes, ledger.peak_bytes, 0)

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        self._meter.ledger.reset_peak()

    def release_cached(self) -> None:
        """Collect garbage; there is no cache to empty."""
        gc.collect()

    def host_region(self) -> AbstractContextManager[None]:
        """Storages made inside are host memory and stay so: never counted, and freeing them gives nothing back."""
        return self._meter.host_region()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: nothing is copied to a card, so there is nothing to pin."""
        return tensor

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A counted copy. Raises torch.OutOfMemoryError."""
        with self._meter.active(), self._meter.counted_region(), torch.no_grad():
            return tensor.detach().clone()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is not counted."""
        with self._meter.active(), self._meter.host_region(), torch.no_grad():
            return tensor.detach().clone()

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same as `download`."""
        return self.download(tensor)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count storages that came about unseen, or in a host region. Raises torch.OutOfMemoryError."""
        self._meter.adopt(tensors)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """The CPU generator's state, as host memory."""
        with self._meter.host_region():
            return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what `rng_state` returned."""
        with self._meter.host_region():
            torch.set_rng_state(state["cpu"])

    def readings(self) -> list[GpuReading]:
        """Empty: no GPU is involved."""
        return []

    def fail_at(self, allocation: int | None, *then: int) -> None:
        """Refuse the `allocation`-th request from now (1 is the next), once, then the `then`-th after that refusal, and
        so on; None takes it back. For torture tests."""
        self._meter.ledger.fail_at(allocation, *then)

    def fail_host_at(self, allocation: int | None) -> None:
        """Let the `allocation`-th host allocation from now fail, once; None takes it back. For torture tests."""
        self._meter.ledger.fail_host_at(allocation)

    def largest(self, count: int) -> list[LiveTensor]:
        """The largest counted allocations, largest first."""
        return self._meter.ledger.largest(count)

    def snapshot(self) -> None:
        """None: the books are in `largest`."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core, unless OMP_NUM_THREADS says otherwise: a simulated run has the same bits on every machine.

    Its models are small, too: on two idle cores a second thread makes demo steps a tenth faster, and beside other busy
    processes two to four times slower, because one always waits for the other to be scheduled.
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
    """The metered device with the profile's capacity, shared with a neighbour where $TUNEDECK_NEIGHBOUR names its file.

    Raises EnvironmentProblem when that file is none that a neighbour made.
    """
    shared = os.environ.get(NEIGHBOUR_VARIABLE)
    neighbour = SharedCount.open(Path(shared)) if shared else None
    device = MeteredDevice(spec.profile.device.capacity_bytes, neighbour)
    if shared:
        device.notices.append(f"the device is shared with whoever writes {shared} (${NEIGHBOUR_VARIABLE})")
    return device
