"""The event file `events.jsonl`: one writer, any number of readers, one JSON object per line. An engine waits while the
disk is full, and adds a heartbeat when it was silent for a while.

A line is complete when it ends in a newline, and is then strict JSON in ASCII; a loss that is not finite is `null`. A
writer removes a torn tail: completed with a newline, it would be a line on which `jq` and pandas fail.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from engine.errors import FULL_DISK, EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.event_schema import check_fields, is_event
from engine.journal.files import decode_json, open_regular

FINAL_STATUSES = ("paused", "done", "stopped", "failed", "oom")
"""Recorded in `run_finished`; queued, running and stale are recorded nowhere (`engine.journal.summary`)."""


Event = dict[str, Any]

READ_BYTES = 1 << 20
"""Size of one read: few calls for a large file, and little memory."""

MOST_LINE_BYTES = 16 << 20
"""Size of the largest event that is read."""


class EventWriter:
    """Appends events to a run's `events.jsonl`. Thread-safe; only rank 0 of the engine that holds the claim has one."""

    def __init__(self, directory: RunDirectory, *, stage: str = "", rank: int = 0) -> None:
        """Remove a torn tail and continue `seq`. `stage` and `rank` are written into every event. Raises OSError."""
        self.stage = stage
        self._rank = rank
        self._lock = threading.Lock()
        self._file = os.open(directory.events, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._seq = _cut_torn_tail(self._file)
        self._last_write = time.monotonic()

    @property
    def last_seq(self) -> int:
        """0 if the file has no event."""
        return self._seq

    def write(self, kind: str, **fields: Any) -> Event:
        """Append one event. Raises ValueError if the fields do not match the kind, OSError on a full disk; the file is
        then as before, so the event can be written again later."""
        check_fields(kind, frozenset(fields))
        with self._lock:
            return self._append(kind, fields)

    def copy(self, event: Event, stage: str) -> Event:
        """Append an event from the journal of `stage`, with its time and fields as they are; its `seq` there becomes
        `stage_seq`. Raises OSError as `write` does."""
        fields = {key: value for key, value in event.items() if key not in ("seq", "kind", "stage")}
        with self._lock:
            return self._append(event["kind"], {**fields, "stage": stage, "stage_seq": event["seq"]})

    def write_if_quiet(self, quiet_seconds: float, kind: str, **fields: Any) -> Event | None:
        """`write`, but only if nothing was written for `quiet_seconds`; else None."""
        check_fields(kind, frozenset(fields))
        with self._lock:
            if time.monotonic() - self._last_write < quiet_seconds:
                return None
            return self._append(kind, fields)

    def close(self) -> None:
        """Writing afterwards raises OSError."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _append(self, kind: str, fields: Event) -> Event:
        event = {
            "seq": self._seq + 1,
            "time": utc_now(),
            "kind": kind,
            "stage": self.stage,
            "rank": self._rank,
            **fields,
        }
        line = encode_event(event)
        end = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # A part of the line may have reached the disk; the next line must not be appended to it.
            if self._file >= 0:
                os.ftruncate(self._file, end)
            raise
        self._seq += 1
        self._last_write = time.monotonic()
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def utc_now() -> str:
    """ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode_event(event: Event) -> bytes:
    """One line of the file, newline included. Raises TypeError for a value that JSON cannot represent."""
    try:
        text = json.dumps(event, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(event), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def decode_event(line: bytes) -> Event | None:
    """The only reader of event lines. None for a damaged line (a power failure can leave zeros), and for an event
    without a field that its kind must have, or with a value of another type; unknown kinds and fields may come from a
    newer version, and pass."""
    try:
        event = decode_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and is_event(event) else None


def _finite(value: Any) -> Any:
    """A copy in which every NaN and infinity, also in nested tables and lists, is None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def _cut_torn_tail(file: int) -> int:
    """Remove the bytes after the last newline; returns the `seq` of the last readable line, 0 when there is none."""
    size = os.fstat(file).st_size
    kept = b""
    start = size
    while start > 0:
        step = min(READ_BYTES, start)
        start -= step
        kept = os.pread(file, step, start) + kept
        if size == start + len(kept) and b"\n" in kept:
            size = start + kept.rindex(b"\n") + 1
            kept = kept[: size - start]
        for line in reversed(kept.split(b"\n")[0 if start == 0 else 1 :]):
            event = decode_event(line)
            if event is not None:
                os.ftruncate(file, size)
                return int(event["seq"])
    os.ftruncate(file, size if kept.endswith(b"\n") else 0)
    return 0


class EventTail:
    """Reads the lines added to an event file since the last call. The file is closed between calls."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        """Where the next complete line begins."""
        self.damaged = 0
        """Complete lines so far that were not events."""

    def poll(self) -> list[Event]:
        """An incomplete last line is returned by a later call."""
        events = []
        for line in self.lines():
            event = decode_event(line)
            if event is None:
                self.damaged += 1
            else:
                events.append(event)
        return events

    def lines(self) -> Iterator[bytes]:
        """The complete lines since the last call, newline included; advances the offset past them. Of a line above
        MOST_LINE_BYTES, which no engine writes, pieces come, and none of them is an event. Raises OSError if the file
        cannot be read."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.offset:
                self.offset = 0  # the file was replaced by a shorter one
            file.seek(self.offset)
            while line := file.readline(MOST_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < MOST_LINE_BYTES:
                    return
                self.offset += len(line)
                yield line


def end_of_events(path: Path) -> int:
    """The byte just after the last complete line: an EventTail from there returns new events only."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return 0
    with file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - READ_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


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
                    "the disk is full, and the run was stopped while it waited for free space",
                    fix="free some space, then continue from the last checkpoint: tunedeck resume RUN",
                ) from error
            log.warning("the disk is full (%s); waiting for free space", error.filename or "events.jsonl")
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
        fix = "free some space, and the run continues; or stop it and resume later"
        if self.writer is None:
            return
        try:
            self.writer.write(
                "warning", code="disk_full", text="the disk is full; the run waits for free space", fix=fix
            )
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
