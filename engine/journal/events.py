"""The event file `events.jsonl`: one writer, any number of readers, one JSON object per line.

The fields of each kind are in `event_schema`; `journal_state` and `summary` interpret sequences of events. Every reader
may rely on these rules:

- a line is complete when it ends in a newline; bytes after the last newline are torn and do not count yet;
- every complete line is strict JSON in ASCII: text from a model cannot break a line, and a loss that is not finite is
  `null` (JSON has no NaN, and with strings every consumer would have to check the type of every number);
- a writer that opens the file removes a torn tail before it appends. Completing it with a newline instead would leave a
  line that `jq`, pandas and other readers fail on; no reader has used the torn bytes.

Try: `tail -f runs/*/events.jsonl | jq .kind`
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.journal.directory import RunDirectory
from engine.journal.event_schema import check_fields

Event = dict[str, Any]

READ_BYTES = 1 << 20
"""Size of one read: few calls for a large file, and little memory."""


class EventWriter:
    """Appends events to a run's `events.jsonl`. Thread-safe; only rank 0 of the engine that holds the claim has one."""

    def __init__(self, directory: RunDirectory, *, stage: str = "", rank: int = 0) -> None:
        """Open the file, remove a torn tail and continue `seq`. `stage` and `rank` are written into every event. Raises
        OSError where the file cannot be written."""
        self.stage = stage
        self._rank = rank
        self._lock = threading.Lock()
        self._file = os.open(directory.events, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._seq = _cut_torn_tail(self._file)
        self._last_write = time.monotonic()

    @property
    def last_seq(self) -> int:
        """`seq` of the last event in the file; 0 if there is none."""
        return self._seq

    def write(self, kind: str, **fields: Any) -> Event:
        """Append one event and return it. Raises ValueError if the fields do not match the kind, OSError on a full
        disk.

        After an OSError the file is as it was before, so the same event can be written again later.
        """
        check_fields(kind, frozenset(fields))
        with self._lock:
            return self._append(kind, fields)

    def copy(self, event: Event, stage: str) -> Event:
        """Append an event from a stage's own journal, with its time and fields as they are, and return the appended
        event. `stage` is the stage's name; the event's `seq` in the stage's journal becomes `stage_seq`. Raises OSError
        as `write` does."""
        fields = {key: value for key, value in event.items() if key not in ("seq", "kind", "stage")}
        with self._lock:
            return self._append(event["kind"], {**fields, "stage": stage, "stage_seq": event["seq"]})

    def write_if_quiet(self, quiet_seconds: float, kind: str, **fields: Any) -> Event | None:
        """Like `write`, but only if nothing was written for `quiet_seconds`; otherwise writes nothing and returns
        None."""
        check_fields(kind, frozenset(fields))
        with self._lock:
            if time.monotonic() - self._last_write < quiet_seconds:
                return None
            return self._append(kind, fields)

    def close(self) -> None:
        """Close the file; writing afterwards raises OSError."""
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
    """The present time in UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode_event(event: Event) -> bytes:
    """One line of the file, newline included. Raises TypeError for a value that JSON cannot represent."""
    try:
        text = json.dumps(event, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(event), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def decode_event(line: bytes) -> Event | None:
    """Parse one complete line; returns None for a damaged line (a power failure can leave zeros)."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def _finite(value: Any) -> Any:
    """A copy of `value` in which every NaN and infinity, also in nested tables and lists, is replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def _cut_torn_tail(file: int) -> int:
    """Remove the bytes after the last newline; return the `seq` of the last readable line, 0 when there is none."""
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
            if event is not None and isinstance(event.get("seq"), int):
                os.ftruncate(file, size)
                return int(event["seq"])
    os.ftruncate(file, size if kept.endswith(b"\n") else 0)
    return 0


class EventTail:
    """Reads the lines that were added to an event file since the last call. Between calls it stores a byte offset;
    the file is closed."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        """The byte where the next complete line begins."""
        self.damaged = 0
        """The number of complete lines so far that were not events."""

    def poll(self) -> list[Event]:
        """The events completed since the last call; an incomplete last line is returned by a later call."""
        events = []
        for line in self.lines():
            event = decode_event(line)
            if event is None:
                self.damaged += 1
            else:
                events.append(event)
        return events

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines since the last call as bytes, newline included, and advance the offset past them."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.offset:
                self.offset = 0  # the file was replaced by a shorter one
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                yield line


def end_of_events(path: Path) -> int:
    """The byte offset just after the last complete line: an EventTail from there returns new events only."""
    try:
        file = path.open("rb")
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
