"""The metered device's books: which storages are live, how many bytes that is, and when the next one is refused.

Arithmetic only. Where allocations are noticed (dispatch mode, patches, threads) is `engine.device.meter`.

Sizes are rounded up to 512 bytes, the block granularity of CUDA's caching allocator (`kMinBlockSize` in
c10/cuda/CUDACachingAllocator.cpp), so that figures compare with predictions for a card. Memory an operation takes for
its own workspace and gives back before it returns is not seen.

Try: `pytest tests/device/test_meter.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from engine.device.base import LiveTensor
from engine.device.co_tenant import SharedCount

BLOCK_BYTES = 512
_NEVER = -1


def rounded(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole 512-byte blocks."""
    return (size_bytes + 511) & -512


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages of `tensors`, each rounded up to whole blocks."""
    sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(map(rounded, sizes.values()))


def storage_key(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage object, by which `LiveTensor.key` names it, too."""
    return int(tensor.untyped_storage()._cdata)


def amount(size_bytes: int) -> str:
    """Bytes for people, in the units CUDA's own message uses: "1.50 MiB"."""
    size: float = size_bytes
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.2f} {unit}" if unit != "bytes" else f"{size_bytes} bytes"
        size /= 1024
    return f"{size:.2f} GiB"


class _Entry(weakref.ref[Any]):
    """A weak reference to one storage that remembers what was counted for it.

    torch keeps a storage's Python object alive for as long as C++ holds the storage (a tensor saved for backward), so
    the callback runs exactly when the memory is freed, before its address can be used again.
    """

    __slots__ = ("dtype", "key", "operation", "shape", "size_bytes")

    key: int
    size_bytes: int
    operation: Any
    shape: tuple[int, ...]
    dtype: Any

    def described(self) -> LiveTensor:
        """For reports."""
        dtype = str(self.dtype).removeprefix("torch.")
        return LiveTensor(str(self.operation), tuple(self.shape), dtype, self.size_bytes, self.key)


class Ledger:
    """Live storages by address, their total, its peak, and the limit."""

    def __init__(self, capacity_bytes: int, neighbour: SharedCount | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._neighbour = neighbour
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.allocations = 0
        """Allocations asked for so far, refused ones included."""
        self.host_allocations = 0
        """Storages that came about as host memory so far, refused ones included."""
        self.live: dict[int, _Entry] = {}
        self.host: dict[int, _Entry] = {}
        self._fail_at, self._host_fail_at = _NEVER, _NEVER
        self._then: tuple[int, ...] = ()
        self.counts_fakes = False
        """Count fake tensors as if they had memory (`engine.simulate`)."""
        self.sums_in_place = False
        """Count the sum of two gradients as taking the first one's place."""
        # Re-entrant: the collector may run the release callback while this thread holds the lock.
        self._lock = threading.RLock()
        self._on_release = self._make_release(self.live)
        self._on_host_release = self._make_release(self.host)

    def _make_release(self, book: dict[int, _Entry]) -> Callable[[_Entry], None]:
        lock, counted = self._lock, book is self.live

        def release(entry: _Entry) -> None:
            with lock:
                if book.get(entry.key) is entry:
                    del book[entry.key]
                    if counted:
                        self.allocated_bytes -= entry.size_bytes

        return release

    def fail_at(self, allocation: int | None, *then: int) -> None:
        """Refuse the `allocation`-th request from now (1 is the next), once; each of `then` counts from the refusal
        before it. None takes all of it back."""
        self._fail_at = _NEVER if allocation is None else self.allocations + allocation
        self._then = then

    def fail_host_at(self, allocation: int | None) -> None:
        """Let the `allocation`-th host allocation from now fail, once; None takes it back."""
        self._host_fail_at = _NEVER if allocation is None else self.host_allocations + allocation

    @property
    def available_bytes(self) -> int:
        """The limit at this moment: the capacity, less what a neighbour holds."""
        if self._neighbour is None:
            return self.capacity_bytes
        return max(0, self.capacity_bytes - self._neighbour.held_bytes)

    def _charge(self, size_bytes: int, operation: Any) -> None:
        """Count one request of `size_bytes` (rounded), or raise torch.OutOfMemoryError and count no bytes."""
        self.allocations += 1
        total = self.allocated_bytes + size_bytes
        if total > self.available_bytes or self.allocations == self._fail_at:
            raise self._refusal(size_bytes, operation)
        self.allocated_bytes = total
        if total > self.peak_bytes:
            self.peak_bytes = total

    def _refusal(self, size_bytes: int, operation: Any) -> torch.OutOfMemoryError:
        if self.allocations == self._fail_at:
            self.fail_at(*(self._then or (None,)))
        available = self.available_bytes
        free = available - self.allocated_bytes
        elsewhere = self.capacity_bytes - available
        neighbour = f" A neighbour holds {amount(elsewhere)}." if elsewhere else ""
        planned = " This request was refused on purpose (fault injection)." if size_bytes <= free else ""
        error = torch.OutOfMemoryError(
            f"The metered (simulated) device is out of memory. Tried to allocate {amount(size_bytes)} in {operation}. "
            f"The device has a total capacity of {amount(self.capacity_bytes)} of which {amount(max(free, 0))} is "
            f"free; {amount(self.allocated_bytes)} is allocated in {len(self.live)} blocks.{neighbour}{planned}"
        )
        error.requested_bytes = size_bytes  # type: ignore[attr-defined]  # the text is rounded; the backoff arithmetic should not be
        return error

    def add(self, storage: torch.UntypedStorage, size_bytes: int, operation: Any, shape: Any, dtype: Any) -> None:
        """Count `storage`, which is in neither book, at `size_bytes`. Raises torch.OutOfMemoryError: no room."""
        size_bytes = rounded(size_bytes)
        with self._lock:
            self._charge(size_bytes, operation)
            entry = _Entry(storage, self._on_release)
            entry.key = key = storage._cdata
            entry.size_bytes = size_bytes
            entry.operation = operation
            entry.shape = shape
            entry.dtype = dtype
            self.live[key] = entry

    def add_host(self, storage: torch.UntypedStorage, *, asked_for: bool = True) -> None:
        """Remember `storage` as host memory: never counted, whatever operation returns it later.

        Raises RuntimeError, worded as torch's host allocator does, where `fail_host_at` asked for it. `asked_for` is
        False for memory that was there already and is only announced.
        """
        with self._lock:
            self.host_allocations += asked_for
            if asked_for and self.host_allocations == self._host_fail_at:
                raise RuntimeError(
                    f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {storage.nbytes()} bytes. "
                    "This host allocation was refused on purpose (fault injection)."
                )
            entry = _Entry(storage, self._on_host_release)
            entry.key = storage._cdata
            self.host[entry.key] = entry

    def forget_host(self, storage: torch.UntypedStorage) -> None:
        """Host memory no longer (it is about to be adopted)."""
        with self._lock:
            self.host.pop(storage._cdata, None)

    def resize(self, entry: _Entry, size_bytes: int, operation: Any) -> None:
        """A counted storage changes size. Raises torch.OutOfMemoryError, and counts the old size still.

        Counted as on CUDA (`resize_bytes_cuda`): a new block is taken, the old one copied, then given back, so that
        both are part of the peak for a moment.
        """
        size_bytes = rounded(size_bytes)
        with self._lock:
            if size_bytes == entry.size_bytes:
                return
            if size_bytes:
                self._charge(size_bytes, operation)
            self.allocated_bytes -= entry.size_bytes
            entry.size_bytes = size_bytes

    def correct(self, entry: _Entry, size_bytes: int) -> None:
        """Set what is counted for a storage, with no request made: a resize that did not happen after all."""
        with self._lock:
            self.allocated_bytes += size_bytes - entry.size_bytes
            entry.size_bytes = size_bytes

    def take_over(self, old: torch.UntypedStorage, new: torch.UntypedStorage, operation: Any, shape: Any) -> None:
        """`new` stands where `old` stood, which is about to go: nothing is requested."""
        with self._lock:
            former = self.live.get(old._cdata)
            if former is None or new._cdata in self.live:
                return
            entry = _Entry(new, self._on_release)
            entry.key, entry.size_bytes = new._cdata, former.size_bytes
            entry.operation, entry.shape, entry.dtype = operation, shape, former.dtype
            former.size_bytes = 0
            self.live[entry.key] = entry

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        with self._lock:
            self.peak_bytes = self.allocated_bytes

    def largest(self, count: int) -> list[LiveTensor]:
        """The `count` largest live storages, largest first."""
        with self._lock:
            entries = sorted(self.live.values(), key=lambda entry: entry.size_bytes, reverse=True)[:count]
        return [entry.described() for entry in entries]
