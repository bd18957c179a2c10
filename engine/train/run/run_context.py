"""What a process is started with, what the parts of a run share, and the watchdog for work that does not end."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.config.schema.run import RunSpec
from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.journal.control import RunRequests
from engine.journal.directory import RunDirectory
from engine.journal.events import Journal

SHARE_OF_PATIENCE = 0.5
"""Share of the ranks' time limit after which to warn: the stacks are logged before a stuck process is ended."""

TIMES_THE_LONGEST = 10.0
"""Work that takes this many times as long as the longest of its kind so far counts as stuck."""


@dataclass(frozen=True)
class Work:
    """A piece of work that should end."""

    kind: str
    """Such as "step" or "evaluation"; only work of the same kind is compared."""
    name: str
    """As in the sentence of a warning: "step 7" or "an evaluation"."""
    began: float


class Watchdog:
    """Warns of work that takes TIMES_THE_LONGEST times as long as the longest of its kind so far, and at least
    SHARE_OF_PATIENCE of `patience_seconds`. It ends nothing: only the user knows whether a run of one device waits for
    a file system or a debugger, and ranks time out by themselves. But while rank 0 works alone, this warning is the
    only sign."""

    def __init__(self, journal: Journal, patience_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal, self._clock = journal, clock
        self._least_seconds = SHARE_OF_PATIENCE * patience_seconds
        self._longest_seconds: dict[str, float] = {}
        self._watched: Work | None = None
        self._told: Work | None = None

    @contextmanager
    def over(self, kind: str, name: str) -> Iterator[None]:
        """Around a piece of work, compared with earlier work of the same `kind`; warnings call it `name`."""
        self._watched = Work(kind, name, self._clock())
        try:
            yield
        finally:
            self.goes_on()
            self._watched = None

    def goes_on(self) -> None:
        """Note that the current work makes progress: its time is measured from this moment on."""
        if self._watched is not None:
            work, now = self._watched, self._clock()
            longest = self._longest_seconds.get(work.kind, 0.0)
            self._longest_seconds[work.kind] = max(longest, now - work.began)
            self._watched = Work(work.kind, work.name, now)

    @contextmanager
    def watching(self) -> Iterator[None]:
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
        """If the current work takes too long, warn and log the stacks of all threads, once for each piece of work."""
        work, now = self._watched, self._clock()
        if work is None or work == self._told:
            return
        longest = self._longest_seconds.get(work.kind, 0.0)
        if now - work.began >= max(self._least_seconds, TIMES_THE_LONGEST * longest):
            self._told = work
            self._tell(work, now - work.began, longest)

    def _tell(self, work: Work, seconds: float, longest: float) -> None:
        sys.stderr.write(f"{work.name} is stuck; stack of every thread:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.stderr.fileno())
        before = f"the longest one took {longest:.1f} s" if longest else "this is the first one"
        self._journal.warn(
            "stuck",
            f"{work.name} has not finished after {seconds:.0f} s; {before}",
            "the stack of every thread is in engine.log (of other ranks: in ranks/)",
        )


@dataclass(frozen=True)
class RunStart:
    spec: RunSpec
    directory: RunDirectory
    ranks: Ranks = SINGLE_PROCESS
    resume: bool = False
    from_step: int | None = None
    """Resume from the newest checkpoint at or before this step; None for the newest of all."""


@dataclass(frozen=True)
class RunContext:
    """What the loop, the checkpoint manager and the evaluator share beside the training set-up."""

    directory: RunDirectory
    journal: Journal
    requests: RunRequests
    watchdog: Watchdog
