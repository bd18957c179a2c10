"""Copies of device tensors in host memory, made on separate streams while the device computes.

`CopyStreams` has a stream for each direction, because a GPU copies in both at once. Three rules make this correct:

- A copy begins when all work that was queued before it has run. Then the tensor is computed, or the memory that is
  copied to is no longer used by its former tensor.
- The computation waits, on the device, for the end of a copy before its result is used or its source is released. So
  no memory is freed while a copy reads or writes it, and the allocator may reuse freed memory at once, as always.
- `settle` releases the tensors of all copies under way by the same rule, after a step or a failed attempt at one.

At most one tensor at a time is being copied to the host, and at most one is being prefetched; the host never waits.

Try: `pytest tests/device/test_host_copies.py`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from engine.errors import UsageError

LARGEST_IN_FLIGHT = 128 * 2**20
"""Tensors of more bytes are copied among the computation: they would be held too long, and prefetching them would take
too much memory."""


class HostCopy(Protocol):
    """A copy of a device tensor in host memory."""

    def prefetch(self) -> None:
        """Start to copy the tensor back to the device, where that can run at the same time as the computation. Raises
        torch.OutOfMemoryError."""
        ...

    def fetch(self) -> torch.Tensor:
        """Return a new device tensor with the copy's values. Raises torch.OutOfMemoryError."""
        ...


@dataclass
class PlainCopy:
    """A host copy that is made, and copied back, on the stream of the computation."""

    host: torch.Tensor
    upload: Callable[[torch.Tensor], torch.Tensor]

    def prefetch(self) -> None:
        """Does nothing: there is no second stream for copies."""

    def fetch(self) -> torch.Tensor:
        """Return a new device tensor with the copy's values. Raises torch.OutOfMemoryError."""
        return self.upload(self.host)


class Stream(Protocol):
    """A queue of work on a device, such as `torch.cuda.Stream`."""

    def record_event(self) -> Any:
        """Return an event that completes when the work queued on this stream so far has run."""
        ...

    def wait_event(self, event: Any) -> None:
        """Make the work queued on this stream from now on wait for `event`. The host does not wait."""
        ...


class Streams(Protocol):
    """The streams of a device: that of the computation (`compute`), one for copies to the host (`out`) and one for
    copies to the device (`back`)."""

    out: Stream
    back: Stream

    def compute(self) -> Stream:
        """The stream on which the calling thread queues its operations."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Context manager: inside the block, operations are queued on `stream`."""
        ...

    def wait_on_host(self, stream: Stream) -> None:
        """Wait on the host until the work queued on `stream` has run."""
        ...


class CudaStreams:
    """The streams of a CUDA card. Implements `Streams`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.out: Stream = torch.cuda.Stream(device)
        self.back: Stream = torch.cuda.Stream(device)

    def compute(self) -> Stream:
        """The current stream of the calling thread."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Context manager: inside the block, `stream` is the current CUDA stream."""
        return torch.cuda.stream(stream)

    def wait_on_host(self, stream: Stream) -> None:
        """Wait on the host until the work queued on `stream` has run; its errors are raised here."""
        stream.record_event().synchronize()


class NoStream:
    """A stream on which all work has run by the time it is queued. Implements `Stream`."""

    def record_event(self) -> None:
        """Return None: there is nothing to wait for."""

    def wait_event(self, event: None) -> None:
        """Do nothing."""


class NoStreams:
    """The streams of a device that runs every operation at once: the CPU. Implements `Streams`."""

    out: Stream = NoStream()
    back: Stream = out

    def compute(self) -> Stream:
        """The one stream that there is."""
        return self.out

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Context manager that does nothing."""
        return nullcontext()

    def wait_on_host(self, stream: Stream) -> None:
        """Do nothing: the work has run."""


class _Leaving(NamedTuple):
    """A tensor that is being copied to the host: the tensor, its version counter when the copy began (which shows
    changes in place), and the event that completes when the copy is done."""

    tensor: torch.Tensor
    version: int
    done: Any


class CopyStreams:
    """Copies device tensors to host memory and back on streams of its own, at the same time as the computation. The
    module's docstring says who waits for what; callers need not synchronise."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self._leaving: _Leaving | None = None
        self._coming: StreamCopy | None = None

    def send(self, tensor: torch.Tensor, host: torch.Tensor) -> StreamCopy:
        """Start to copy `tensor` to `host`, a page-locked tensor of its shape and dtype; returns the host copy. Before
        that, the tensor sent last is released (`_let_go`).

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
        """Make the computation wait for the copy of the tensor that was sent last, then drop the reference to the
        tensor, so that its memory can be freed. Raises UsageError if it was changed in place meanwhile."""
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
        """Start to copy `copy` back to the device. Raises torch.OutOfMemoryError."""
        compute, back = self._streams.compute(), self._streams.back
        arriving = torch.empty_like(copy.host, device=self._device, pin_memory=False)
        back.wait_event(copy.sent)
        back.wait_event(compute.record_event())
        with self._streams.on(back):
            arriving.copy_(copy.host, non_blocking=True)
        copy.arriving, copy.arrived = arriving, back.record_event()

    def prefetch(self, copy: StreamCopy) -> None:
        """Start to copy `copy` back to the device, unless it is larger than LARGEST_IN_FLIGHT bytes or another copy is
        being prefetched. Raises torch.OutOfMemoryError."""
        if self._coming is None and not _is_large(copy.host):
            self.begin(copy)
            self._coming = copy

    def take(self, copy: StreamCopy) -> torch.Tensor:
        """Return the device tensor of `copy`; the copying is started if it was not prefetched. The computation waits
        for the end of the copying, the host does not."""
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
        """Make the computation wait for the copies under way in both directions, then drop the references to their
        device tensors. The host copies remain valid. Raises UsageError as `send` does."""
        if self._coming is not None:
            self.take(self._coming)
        self._let_go()


@dataclass(eq=False)
class StreamCopy:
    """A host copy of `CopyStreams`. Implements `HostCopy`."""

    copies: CopyStreams
    host: torch.Tensor
    sent: Any
    """The event that completes when `host` has the tensor's values."""
    arriving: torch.Tensor | None = None
    """The device tensor that is being filled by a prefetch; None if none is under way."""
    arrived: Any = None

    def prefetch(self) -> None:
        """Start to copy the tensor back to the device, unless it is large or another copy is being prefetched. Raises
        torch.OutOfMemoryError."""
        self.copies.prefetch(self)

    def fetch(self) -> torch.Tensor:
        """Return a new device tensor with the copy's values. The computation waits for the copying, the host does not.
        Raises torch.OutOfMemoryError."""
        return self.copies.take(self)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > LARGEST_IN_FLIGHT
