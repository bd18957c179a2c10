"""How an engine writes its events: it waits while the disk is full, and adds a heartbeat when it was silent for a
while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from engine.errors import FULL_DISK, EnvironmentProblem
from engine.journal.events import EventWriter

WAIT_SECONDS = 2.0

log = logging.getLogger(__name__)
T = TypeVar("T")


def until_there_is_room(
    action: Callable[[], T],
    interrupted: Callable[[], bool] = lambda: False,
    on_full: Callable[[], None] = lambda: None,
) -> T:
    """Run `action`; while the disk is full, wait and run it again. `on_full` is called at the first failure. Other
    errors pass. EnvironmentProblem if `interrupted` returns True after a failure."""
    warned = False
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            if interrupted():
                raise EnvironmentProblem(
                    "the disk is full, and the run was asked to end while it waited for room",
                    fix="make room, then go on from the last checkpoint: tunedeck resume RUN",
                ) from error
            log.warning("the disk is full (%s); waiting for room", error.filename or "events.jsonl")
        if not warned:
            on_full()
            warned = True
        time.sleep(WAIT_SECONDS)


class Journal:
    """Writes the events of one run; without `writer` (on every rank but 0) only warnings, to the log alone."""

    def __init__(self, writer: EventWriter | None) -> None:
        self.writer = writer
        self._phase: tuple[str, str] | None = None

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event, waiting while the disk is full. ValueError for a field that this kind does not have."""
        writer = self.writer
        if writer is not None:
            until_there_is_room(lambda: writer.write(kind, **fields))

    def phase(self, name: str, detail: str = "") -> None:
        """Write the event `phase`, what the engine is doing, unless it is that of the last one."""
        if self._phase != (name, detail):
            self._phase = name, detail
            self.write("phase", name=name, detail=detail)

    def warn_of_full_disk(self) -> None:
        """Write a warning that the run waits for disk space. If not even that fits, only engine.log has it."""
        fix = "make room and the run goes on by itself; or stop it, and resume later"
        if self.writer is None:
            return
        try:
            self.writer.write("warning", code="disk_full", text="the disk is full: the run waits for room", fix=fix)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise

    def write_notices(self, notices: list[str]) -> None:
        """Write the device's notices as warnings and remove them from the list: more may come during the run."""
        while notices:
            self.warn("device", notices.pop(0))

    def warn(self, code: str, text: str, fix: str = "", **fields: int) -> None:
        """`fix` says what the user can do about it; `fields` are further ones of the event, such as `step`."""
        log.warning("%s: %s", code, text)
        self.write("warning", code=code, text=text, fix=fix, **fields)


HEARTBEAT_SECONDS = 5.0
"""The longest time between two events while the engine lives. A quiet hour costs 720 lines, about 60 KB."""


@contextmanager
def heartbeats(writer: EventWriter, *, every_seconds: float = HEARTBEAT_SECONDS) -> Iterator[None]:
    """Inside the block, write a heartbeat whenever nothing else was written for `every_seconds`: readers judge
    by the age of the event file whether an engine lives."""
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(writer, over, every_seconds), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _beat(writer: EventWriter, over: threading.Event, every_seconds: float) -> None:
    while not over.wait(every_seconds / 2):
        try:
            writer.write_if_quiet(every_seconds, "heartbeat")
        except OSError:
            # On a full disk this thread goes on: space may be freed, and the engine itself reports the full disk.
            continue
