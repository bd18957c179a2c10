"""Counts the bytes of live storages for the metered device, tracks the peak, and refuses what exceeds the capacity.
Sizes are rounded up to 512 bytes, as CUDA's caching allocator does (`kMinBlockSize` in
c10/cuda/CUDACachingAllocator.cpp)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from engine.budget.calibration import round_to_blocks
from engine.device.base import LiveTensor
from engine.device.co_tenant import SharedByteCount
from engine.device.oom import REQUESTED_BYTES

_NEVER = -1


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Total bytes of the distinct storages of `tensors`, each rounded up to whole 512-byte blocks."""
    sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(map(round_to_blocks, sizes.values()))


def storage_key(tensor: torch.Tensor) -> int:
    """Address of the storage object; `LiveTensor.key` is the same."""
    return int(tensor.untyped_storage()._cdata)


def format_bytes(size_bytes: int) -> str:
    """Format as CUDA's out-of-memory message does, such as "1.50 MiB"."""
    size: float = size_bytes
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.2f} {unit}" if unit != "bytes" else f"{size_bytes} bytes"
        size /= 1024
    return f"{size:.2f} GiB"


class _TrackedStorage(weakref.ref[Any]):
    """A weak reference to one storage, with the bytes counted for it.

    torch keeps a storage's Python object alive as long as C++ holds the storage (for a tensor saved for backward), so
    the callback runs exactly when the memory is freed, before the address can be reused.
    """

    __slots__ = ("dtype", "key", "operation", "shape", "size_bytes")

    key: int
    size_bytes: int
    operation: Any
    shape: tuple[int, ...]
    dtype: Any

    def as_live_tensor(self) -> LiveTensor:
        dtype = str(self.dtype).removeprefix("torch.")
        return LiveTensor(str(self.operation), tuple(self.shape), dtype, self.size_bytes, self.key)


class AllocationTracker:
    """Tracks live storages by address, their total bytes and the peak of the total, and limits the total."""

    def __init__(self, capacity_bytes: int, co_tenant: SharedByteCount | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._co_tenant = co_tenant
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.allocations = 0
        """Allocations requested so far, including refused ones."""
        self.host_allocations = 0
        """Host allocations requested so far, including refused ones."""
        self.live: dict[int, _TrackedStorage] = {}
        self.host: dict[int, _TrackedStorage] = {}
        self._fail_at, self._host_fail_at = _NEVER, _NEVER
        self._then: tuple[int, ...] = ()
        self.counts_fake_tensors = False
        """Whether fake tensors count as if they had memory (`engine.extras.simulate`)."""
        self.log: list[int] | None = None
        """Bytes of each allocation and (negative) release, appended while this is a list (`engine.extras.simulate`)."""
        self.sums_gradients_in_place = False
        """Whether the sum of two gradients counts as written into the first one, as happens on a card."""
        # Re-entrant: garbage collection may run the release callback while this thread holds the lock.
        self._lock = threading.RLock()
        self._on_release = self._make_release(self.live)
        self._on_host_release = self._make_release(self.host)

    def _make_release(self, book: dict[int, _TrackedStorage]) -> Callable[[_TrackedStorage], None]:
        lock, counted = self._lock, book is self.live

        def release(entry: _TrackedStorage) -> None:
            with lock:
                if book.get(entry.key) is entry:
                    del book[entry.key]
                    if counted:
                        self.allocated_bytes -= entry.size_bytes
                        if self.log is not None:
                            self.log.append(-entry.size_bytes)

        return release

    def fail_at(self, allocation: int | None, *then: int) -> None:
        """Plan to refuse the `allocation`-th allocation from now (1 is the next); each number in `then` counts from the
        previous refusal. None cancels all."""
        self._fail_at = _NEVER if allocation is None else self.allocations + allocation
        self._then = then

    def fail_host_at(self, allocation: int | None) -> None:
        """Plan to refuse one host allocation, as `fail_at` does for the device."""
        self._host_fail_at = _NEVER if allocation is None else self.host_allocations + allocation

    @property
    def available_bytes(self) -> int:
        """The capacity minus the bytes held by the co-tenant."""
        if self._co_tenant is None:
            return self.capacity_bytes
        return max(0, self.capacity_bytes - self._co_tenant.held_bytes)

    def _charge(self, size_bytes: int, operation: Any) -> None:
        """Add bytes that are rounded to blocks. Raises torch.OutOfMemoryError if refused; then nothing is added."""
        self.allocations += 1
        total = self.allocated_bytes + size_bytes
        if total > self.available_bytes or self.allocations == self._fail_at:
            raise self._refusal(size_bytes, operation)
        self.allocated_bytes = total
        if self.log is not None:
            self.log.append(size_bytes)
        if total > self.peak_bytes:
            self.peak_bytes = total

    def _refusal(self, size_bytes: int, operation: Any) -> torch.OutOfMemoryError:
        if self.allocations == self._fail_at:
            self.fail_at(*(self._then or (None,)))
        available = self.available_bytes
        free = available - self.allocated_bytes
        elsewhere = self.capacity_bytes - available
        co_tenant = f" Another process holds {format_bytes(elsewhere)}." if elsewhere else ""
        planned = " This allocation failed on purpose (fault injection)." if size_bytes <= free else ""
        requested, total, left = (format_bytes(size) for size in (size_bytes, self.capacity_bytes, max(free, 0)))
        error = torch.OutOfMemoryError(
            f"The metered (simulated) device is out of memory. Tried to allocate {requested} in {operation}. "
            f"The device has a total capacity of {total} of which {left} is free; "
            f"{format_bytes(self.allocated_bytes)} is allocated in {len(self.live)} blocks.{co_tenant}{planned}"
        )
        setattr(error, REQUESTED_BYTES, size_bytes)
        return error

    def add(self, storage: torch.UntypedStorage, size_bytes: int, operation: Any, shape: Any, dtype: Any) -> None:
        """Count `storage` as device memory. Raises torch.OutOfMemoryError if it is refused."""
        size_bytes = round_to_blocks(size_bytes)
        with self._lock:
            self._charge(size_bytes, operation)
            entry = _TrackedStorage(storage, self._on_release)
            entry.key = key = storage._cdata
            entry.size_bytes = size_bytes
            entry.operation = operation
            entry.shape = shape
            entry.dtype = dtype
            self.live[key] = entry

    def add_host(self, storage: torch.UntypedStorage, *, is_new: bool = True) -> None:
        """Record `storage` as host memory, so that a later operation which returns a tensor on it does not count it.

        `is_new` is False for existing memory that is only wrapped in a tensor. Raises RuntimeError, with the message of
        torch's host allocator, if `fail_host_at` planned it.
        """
        with self._lock:
            self.host_allocations += is_new
            if is_new and self.host_allocations == self._host_fail_at:
                raise RuntimeError(
                    f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {storage.nbytes()} "
                    "bytes. This host allocation failed on purpose (fault injection)."
                )
            entry = _TrackedStorage(storage, self._on_host_release)
            entry.key = storage._cdata
            self.host[entry.key] = entry

    def forget_host(self, storage: torch.UntypedStorage) -> None:
        """It is counted as device memory from now on."""
        with self._lock:
            self.host.pop(storage._cdata, None)

    def resize(self, entry: _TrackedStorage, size_bytes: int, operation: Any) -> None:
        """Change the size counted for a storage; if refused, raises torch.OutOfMemoryError and keeps the old size.

        As on CUDA (`resize_bytes_cuda`), the old block is copied into a new one, then freed: the peak includes both.
        """
        size_bytes = round_to_blocks(size_bytes)
        with self._lock:
            if size_bytes == entry.size_bytes:
                return
            if size_bytes:
                self._charge(size_bytes, operation)
            self.allocated_bytes -= entry.size_bytes
            if self.log is not None:
                self.log.append(-entry.size_bytes)
            entry.size_bytes = size_bytes

    def undo_resize(self, entry: _TrackedStorage, size_bytes: int) -> None:
        """Restore the size before a resize that failed, without counting an allocation."""
        with self._lock:
            self.allocated_bytes += size_bytes - entry.size_bytes
            entry.size_bytes = size_bytes

    def transfer(self, old: torch.UntypedStorage, new: torch.UntypedStorage, operation: Any, shape: Any) -> None:
        """Transfer the charge of `old`, which is about to be freed, to `new` without counting a new allocation."""
        with self._lock:
            former = self.live.get(old._cdata)
            if former is None or new._cdata in self.live:
                return
            entry = _TrackedStorage(new, self._on_release)
            entry.key, entry.size_bytes = new._cdata, former.size_bytes
            entry.operation, entry.shape, entry.dtype = operation, shape, former.dtype
            former.size_bytes = 0
            self.live[entry.key] = entry

    def reset_peak(self) -> None:
        with self._lock:
            self.peak_bytes = self.allocated_bytes

    def largest(self, count: int) -> list[LiveTensor]:
        """Largest live storages first."""
        with self._lock:
            entries = sorted(self.live.values(), key=lambda entry: entry.size_bytes, reverse=True)[:count]
        return [entry.as_live_tensor() for entry in entries]
