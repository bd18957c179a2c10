"""Prepares the micro-batches of a step on the host, the next ones while the device computes the current one.

Preparing a micro-batch means reading its tokens, padding them, and copying them to page-locked memory, so that the copy
to the device does not wait for the work queued there. Copying to the device is left to the caller, in whose attempt at
the step an out-of-memory error belongs.

Try: `pytest tests/train/test_batch_loader.py`
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.data.batch import Batch
from engine.device.base import Device

AHEAD = 2
"""Micro-batches prepared ahead of the current one. They are host memory: a few hundred kilobytes each."""


class BatchLoader:
    """Prepares micro-batches in a thread of its own where the device computes beside the host, else when they are
    asked for."""

    def __init__(self, device: Device, prepare: Callable[[NDArray[np.int64]], Batch]) -> None:
        """`prepare` makes the micro-batch of the samples with given indices, in host memory."""
        self.device, self._prepare = device, prepare
        self.wait_seconds = 0.0
        """How long the caller of `batches` has waited for data in all."""
        self._thread = ThreadPoolExecutor(1, "batches") if device.asynchronous else None

    def batches(self, chosen: Sequence[NDArray[np.int64]]) -> Generator[Batch, None, None]:
        """Yield the micro-batch of each group of samples in `chosen`, in order, in host memory.

        Close the iterator when an attempt at the step ends early: what was prepared ahead is dropped. An error in the
        thread is raised here, when its micro-batch is due.
        """
        if self._thread is None:
            for samples in chosen:
                yield self._timed(partial(self._on_host, samples))
            return
        left = deque(chosen)
        ahead: deque[Future[Batch]] = deque()
        try:
            while left or ahead:
                while left and len(ahead) <= AHEAD:
                    ahead.append(self._thread.submit(self._on_host, left.popleft()))
                yield self._timed(ahead.popleft().result)
        finally:
            for future in ahead:
                future.cancel()
            for future in ahead:
                if not future.cancelled():
                    future.exception()  # wait for it: nothing of this attempt may be left running

    def _timed(self, action: Callable[[], Batch]) -> Batch:
        began = time.perf_counter()
        try:
            return action()
        finally:
            self.wait_seconds += time.perf_counter() - began

    def _on_host(self, samples: NDArray[np.int64]) -> Batch:
        device = self.device
        with device.activate(), device.host_region():
            return self._prepare(samples).moved(device.pin)
