"""Copies of device tensors in host memory, made on separate streams while the device computes; and page-locked
memory."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from engine.errors import UsageError


class Registrar(Protocol):
    """The two functions of `torch.cuda.cudart()` that are used here; they return a CUDA error code, 0 for success."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> Any:  # CUDA writes it so
        ...

    def cudaHostUnregister(self, address: int, /) -> Any:  # CUDA writes it so
        ...


def page_locked_copy(tensor: torch.Tensor, registrar: Registrar) -> tuple[torch.Tensor, int]:
    """Copy `tensor` to whole pages of host memory, page-locked until the copy is freed. Returns the complete copy and
    CUDA's error code: 0, or the reason why it is ordinary memory. torch's own allocator of page-locked memory rounds
    tensors up to a power of two, by up to their size again. That suits batches, which come and go, but not gigabytes of
    optimizer state (`cudaHostRegister`, CUDA Runtime API)."""
    used_bytes = tensor.numel() * tensor.element_size()
    size_bytes = -(-used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = torch.empty(size_bytes + mmap.PAGESIZE, dtype=torch.uint8)
    first = -pages.data_ptr() % mmap.PAGESIZE
    copy = pages[first : first + used_bytes].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor.detach())
    if not used_bytes:
        return copy, 0
    code = int(registrar.cudaHostRegister(copy.data_ptr(), size_bytes, 0))
    if code == 0:
        # Of the storage, not of the tensor: views of the copy share the storage and may live longer.
        released = weakref.finalize(copy.untyped_storage(), registrar.cudaHostUnregister, copy.data_ptr())
        released.atexit = False  # CUDA may be shut down by then, and the process ends anyway
    return copy, code


LARGEST_IN_FLIGHT = 128 * 2**20
"""Larger tensors are copied among the computation: held too long otherwise, and too large to prefetch."""


class HostCopy(Protocol):
    def prefetch(self) -> None:
        """Start to copy the tensor back, where that can run beside the computation. Raises torch.OutOfMemoryError."""
        ...

    def fetch(self) -> torch.Tensor:
        """A new device tensor with the copy's values. Raises torch.OutOfMemoryError."""
        ...


@dataclass
class PlainCopy:
    """A host copy that is made, and copied back, on the stream of the computation."""

    host: torch.Tensor
    upload: Callable[[torch.Tensor], torch.Tensor]

    def prefetch(self) -> None:
        """Does nothing: there is no second stream for copies."""

    def fetch(self) -> torch.Tensor:
        return self.upload(self.host)


class Stream(Protocol):
    """A queue of work on a device, such as `torch.cuda.Stream`."""

    def record_event(self) -> Any:
        """An event that completes when the work queued on this stream so far has run."""
        ...

    def wait_event(self, event: Any) -> None:
        """Make the work queued on this stream from now on wait for `event`. The host does not wait."""
        ...


class Streams(Protocol):
    """The streams of a device: computation (`compute`), copies to the host (`out`) and to the device (`back`)."""

    out: Stream
    back: Stream

    def compute(self) -> Stream:
        """The stream on which the calling thread queues its operations."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Operations inside the block are queued on `stream`."""
        ...

    def wait_on_host(self, stream: Stream) -> None:
        """Wait on the host until the work queued on `stream` has run."""
        ...


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.out: Stream = torch.cuda.Stream(device)
        self.back: Stream = torch.cuda.Stream(device)

    def compute(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def wait_on_host(self, stream: Stream) -> None:
        """Errors of the queued work are raised here."""
        stream.record_event().synchronize()


class NoStream:
    """A stream on which all work has run by the time it is queued."""

    def record_event(self) -> None:
        """Return None: there is nothing to wait for."""

    def wait_event(self, event: None) -> None:
        """Do nothing."""


class NoStreams:
    """The streams of a device that runs every operation at once: the CPU."""

    out: Stream = NoStream()
    back: Stream = out

    def compute(self) -> Stream:
        return self.out

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def wait_on_host(self, stream: Stream) -> None:
        """Do nothing: the work has run."""


class _Leaving(NamedTuple):
    """A tensor that is being copied to the host, its version counter when the copy began (which shows changes in
    place), and the event that completes with the copy."""

    tensor: torch.Tensor
    version: int
    done: Any


class CopyStreams:
    """Copies device tensors to the host and back on streams of its own; callers need not synchronise.

    Three rules make this correct. A copy begins when all work queued before it has run: then the tensor is computed, or
    the memory copied to is no longer used by its former tensor. The computation waits, on the device, for the end of a
    copy before its result is used or its source released, so no memory is freed while a copy uses it. `settle` releases
    by the same rule, after a step or a failed attempt. At most one tensor is being copied to the host, and one
    prefetched.
    """

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self._leaving: _Leaving | None = None
        self._coming: StreamCopy | None = None

    def send(self, tensor: torch.Tensor, host: torch.Tensor) -> StreamCopy:
        """Start to copy `tensor` to `host`, page-locked and of its shape and dtype, after the tensor sent last is
        released.

        Raises UsageError: the tensor sent last was changed in place while it was copied.
        """
        self._let_go()
        tensor, compute = tensor.detach(), self._streams.compute()
        # To other strides torch copies through memory of the card, which the stream of copies would take for itself.
        if _is_large(tensor) or tensor.stride() != host.stride():
            host.copy_(tensor, non_blocking=True)
            return StreamCopy(self, host, compute.record_event())
        out = self._streams.out
        out.wait_event(compute.record_event())
        with self._streams.on(out):
            host.copy_(tensor, non_blocking=True)
        done = out.record_event()
        self._leaving = _Leaving(tensor, tensor._version, done)
        return StreamCopy(self, host, done)

    def _let_go(self) -> None:
        """Release the tensor sent last once its copy is done. Raises UsageError if it changed in place meanwhile."""
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        self._streams.compute().wait_event(leaving.done)
        if leaving.tensor._version != leaving.version:
            raise UsageError(
                "the model changes an activation in place while it is copied to the host",
                fix="train.activation_offload = false",
            )

    def begin(self, copy: StreamCopy) -> None:
        """Raises torch.OutOfMemoryError."""
        compute, back = self._streams.compute(), self._streams.back
        arriving = torch.empty_like(copy.host, device=self._device, pin_memory=False)
        back.wait_event(copy.sent)
        back.wait_event(compute.record_event())
        with self._streams.on(back):
            arriving.copy_(copy.host, non_blocking=True)
        copy.arriving, copy.arrived = arriving, back.record_event()

    def prefetch(self, copy: StreamCopy) -> None:
        """Start to copy back, unless `copy` is larger than LARGEST_IN_FLIGHT or another one is being prefetched. Raises
        torch.OutOfMemoryError."""
        if self._coming is None and not _is_large(copy.host):
            self.begin(copy)
            self._coming = copy

    def take(self, copy: StreamCopy) -> torch.Tensor:
        """Copying starts now if it was not prefetched; the computation waits for its end, the host does not."""
        if copy.arriving is None:
            self.begin(copy)
        arriving, arrived = copy.arriving, copy.arrived
        assert arriving is not None
        copy.arriving = copy.arrived = None
        if self._coming is copy:
            self._coming = None
        self._streams.compute().wait_event(arrived)
        return arriving

    def settle(self) -> None:
        """Release the device tensors of copies under way in both directions; host copies remain valid. Raises
        UsageError as `send` does."""
        if self._coming is not None:
            self.take(self._coming)
        self._let_go()


@dataclass(eq=False)
class StreamCopy:
    copies: CopyStreams
    host: torch.Tensor
    sent: Any
    """The event that completes when `host` has the tensor's values."""
    arriving: torch.Tensor | None = None
    """The device tensor that a prefetch is filling; None if none is under way."""
    arrived: Any = None

    def prefetch(self) -> None:
        self.copies.prefetch(self)

    def fetch(self) -> torch.Tensor:
        """The computation waits for the copying, the host does not."""
        return self.copies.take(self)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > LARGEST_IN_FLIGHT
