"""Writes the events of a run, waiting while the disk is full.

A disk that fills up pauses the run instead of killing it: the write waits until there is room. Steps already done are
not lost, because nothing goes on before their line is written.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from engine.errors import EnvironmentProblem
from engine.journal.events import EventWriter

WAIT_SECONDS = 2.0
FULL = {errno.ENOSPC, errno.EDQUOT}

log = logging.getLogger(__name__)
T = TypeVar("T")


def until_there_is_room(
    action: Callable[[], T],
    interrupted: Callable[[], bool] = lambda: False,
    on_full: Callable[[], None] = lambda: None,
) -> T:
    """Run `action` and return its result; while it fails for want of disk space, wait and run it again. `on_full` is
    called at the first failure. Other errors pass through. Raises EnvironmentProblem if `interrupted` returns True
    after a failure."""
    warned = False
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in FULL:
                raise
            if interrupted():
                raise EnvironmentProblem(
                    "the disk is full, and the run was asked to end while it waited for room",
                    fix="make room, then go on from the last checkpoint with: tunedeck resume",
                ) from error
            log.warning("the disk is full (%s); waiting for room", error.filename or "events.jsonl")
        if not warned:
            on_full()
            warned = True
        time.sleep(WAIT_SECONDS)


class Journal:
    """Writes the events of one run. If `writer` is None, as on every rank but rank 0, events are not written, and
    warnings go to the log alone."""

    def __init__(self, writer: EventWriter | None) -> None:
        self.writer = writer
        self._phase: tuple[str, str] | None = None

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event to the journal, waiting while the disk is full. Raises ValueError for a field that events of
        this kind do not have."""
        writer = self.writer
        if writer is not None:
            until_there_is_room(lambda: writer.write(kind, **fields))

    def phase(self, name: str, detail: str = "") -> None:
        """Write the event `phase`, which says what the engine is doing, unless `name` and `detail` are those of the
        last one."""
        if self._phase != (name, detail):
            self._phase = name, detail
            self.write("phase", name=name, detail=detail)

    def warn_of_full_disk(self) -> None:
        """Write a warning that the run waits for disk space. If not even the warning fits, only engine.log has it."""
        fix = "make room and the run goes on by itself; or stop it, and resume later"
        if self.writer is None:
            return
        try:
            self.writer.write("warning", code="disk_full", text="the disk is full: the run waits for room", fix=fix)
        except OSError as error:
            if error.errno not in FULL:
                raise

    def write_notices(self, notices: list[str]) -> None:
        """Write the device's notices as warnings and remove them from the list: more may come during the run."""
        while notices:
            self.warn("device", notices.pop(0))

    def warn(self, code: str, text: str, fix: str = "") -> None:
        """Write the event `warning`; `fix` says what the user can do about it."""
        log.warning("%s: %s", code, text)
        self.write("warning", code=code, text=text, fix=fix)
