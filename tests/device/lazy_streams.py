"""Streams without a GPU: copies beside the computation run as late as their events allow.

What the computation does not wait for has not happened yet, so a missing wait shows as a wrong value, and device memory
that is given up too early raises an error. Not a test module.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device.host_copies import CopyStreams, HostCopy, Stream
from engine.device.metered import MeteredDevice

Event = Callable[[], None]
"""Runs the work that it stands for, if that has not run yet."""


class ComputedSoFar:
    """An event of the computation, which never needs to run anything."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def __call__(self) -> None: ...


class Computation:
    """The stream of the computation, which runs everything at once."""

    def __init__(self) -> None:
        self.passes = 0
        """Tests count here what they compute, if copies must wait for it."""

    def record_event(self) -> Event:
        return ComputedSoFar(self.passes)

    def wait_event(self, event: Event) -> None:
        event()


class LazyStream:
    """A stream whose work runs when somebody waits for it."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self._queued, self._run = 0, 0
        self.after = -1
        """The passes of the computation that this stream's next work waits for."""

    def add(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self._queued += 1

    def record_event(self) -> Event:
        last = self._queued

        def run() -> None:
            while self._run < last:
                self._run += 1
                self.queue.popleft()()

        return run

    def wait_event(self, event: Event) -> None:
        if isinstance(event, ComputedSoFar):
            self.after = event.passes
        self.add(event)


class _Queued(TorchDispatchMode):
    """Queues copies on a stream instead of making them. Of target and source, `host` (0 or 1) is page-locked memory,
    which torch itself keeps until the copy has ended; if nobody wants it any more, the copy does nothing."""

    def __init__(self, stream: LazyStream, host: int, computation: Computation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.stream, self.host, self.computation = stream, host, computation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default, f"{func} on a stream for copies"
        assert self.stream.after == self.computation.passes, "a copy that does not wait for the computation"
        target, source = (weakref.ref(tensor.untyped_storage()) for tensor in args[:2])
        views = [(each.dtype, each.storage_offset(), each.shape, each.stride()) for each in args[:2]]

        def copy() -> None:
            storages = [each() for each in (target, source)]
            assert storages[1 - self.host] is not None, "memory was given up before its copy had ended"
            tensors = [
                torch.empty(0, dtype=dtype).set_(storage, *view)
                for storage, (dtype, *view) in zip(storages, views, strict=True)
                if storage is not None
            ]
            if len(tensors) == 2:
                tensors[0].copy_(tensors[1])

        self.stream.add(copy)
        return args[0]


class LazyStreams:
    """Implements `Streams`."""

    def __init__(self) -> None:
        self.out: Stream = LazyStream()
        self.back: Stream = LazyStream()
        self.computation = Computation()

    def compute(self) -> Stream:
        return self.computation

    @contextmanager
    def on(self, stream: LazyStream) -> Iterator[None]:
        with _Queued(stream, 0 if stream is self.out else 1, self.computation):
            yield

    def wait_on_host(self, stream: Stream) -> None:
        stream.record_event()()


class LazyDevice(MeteredDevice):
    """A metered device that copies to the host and back on lazy streams."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.streams = self.lazy = LazyStreams()
        self.copies = CopyStreams(self.lazy, self.torch_device)

    def offload(self, tensor: torch.Tensor) -> HostCopy:
        with self.host_region():
            host = torch.empty_like(tensor)
        return self.copies.send(tensor, host)

    def settle_offloads(self) -> None:
        self.copies.settle()
