"""Notices a step that does not end: says so in the journal, once, and writes what every thread is doing to the log.

It ends nothing. A run of several devices is started again when a rank does not answer the others in time; a run of one
may be waiting for a file system or a debugger, and only its user can know.

Try: `pytest tests/train/test_watchdog.py`
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.train.journal import Journal

SHARE_OF_PATIENCE = 0.5
"""Of the time that ranks wait for each other: the stacks are in the log before the stuck process is ended."""

TIMES_THE_LONGEST = 10.0
"""A step that takes this many times the longest so far is no step like the others."""


class Watchdog:
    """Watches one step after another."""

    def __init__(
        self, journal: Journal, patience_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._journal, self._clock = journal, clock
        self._least_seconds = SHARE_OF_PATIENCE * patience_seconds
        self._longest_seconds = 0.0
        self._watched: tuple[int, float] | None = None
        """The present step, and when it began."""
        self._told: tuple[int, float] | None = None

    @property
    def limit_seconds(self) -> float:
        """How long a step may take before it is told of."""
        return max(self._least_seconds, TIMES_THE_LONGEST * self._longest_seconds)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is optimizer step `number`."""
        began = self._clock()
        self._watched = number, began
        try:
            yield
        finally:
            self._watched = None
        self._longest_seconds = max(self._longest_seconds, self._clock() - began)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the block runs, steps are watched."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(min(1.0, self._least_seconds / 4)):
            self.look()

    def look(self) -> None:
        """Tell of the present step if it takes too long and was not told of."""
        watched, now = self._watched, self._clock()
        if watched is None or watched == self._told or now - watched[1] < self.limit_seconds:
            return
        self._told = watched
        self._tell(watched[0], now - watched[1])

    def _tell(self, step: int, seconds: float) -> None:
        sys.stderr.write(f"step {step} does not end; what every thread is doing:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.stderr.fileno())
        before = f"the longest before it {self._longest_seconds:.1f} s" if self._longest_seconds else "it is the first"
        self._journal.warn(
            "stuck",
            f"step {step} has taken {seconds:.0f} s and does not end; {before}",
            "what every thread was doing is in engine.log (of other ranks: in ranks/)",
        )
