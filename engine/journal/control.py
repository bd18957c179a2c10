"""Requests to a run: control files, signals and --max-hours. The training loop looks at them between steps, and answers
with `control` events."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from engine.errors import KILLED_CODE
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, utc_now
from engine.journal.files import read_table, write_atomically

REQUESTS = ("stop", "pause", "checkpoint")

BY_SIGNAL = "signal"
"""The reason of a stop that a signal asked for."""


@contextmanager
def calling_on_signal(act: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, SIGTERM and SIGINT call `act`, SIGHUP (a closed terminal) does nothing. Main thread only."""

    def handle(number: int, _frame: FrameType | None) -> None:
        act(number)

    previous: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Request:
    """One request: its name ("stop", "pause", …), when it was sent (UTC, ISO 8601), and further fields."""

    name: str
    time: str
    fields: dict[str, Any] = field(default_factory=dict)


def send_request(directory: RunDirectory, name: str, **fields: Any) -> None:
    """Send a request as a file, which unlike a signal reaches an engine on another machine that shares the disk. Raises
    ValueError for an unknown name, OSError on a full disk."""
    if name not in REQUESTS:
        raise ValueError(f"unknown request {name!r}; known: {', '.join(REQUESTS)}")
    directory.control.mkdir(exist_ok=True)
    path = next_request_file(directory.control, name)
    write_atomically(path, json.dumps({"request": name, "time": utc_now(), "fields": fields}) + "\n")
    (directory.control / f"{name}.asked").touch()


def next_request_file(control: Path, name: str) -> Path:
    """A file for a request whose name sorts behind those of all requests that wait, also after the clock was set
    back. Raises OSError without the folder."""
    waiting = (file.partition("-")[0] for file in os.listdir(control))
    last = max((int(number) for number in waiting if number.isdecimal()), default=0)
    return control / f"{max(time.time_ns(), last + 1):020d}-{name}.json"


def was_requested(directory: RunDirectory, name: str) -> bool:
    """Whether `name` was sent since `clear_requests`: no event says so before the engine's answer."""
    return (directory.control / f"{name}.asked").exists()


def clear_requests(directory: RunDirectory) -> None:
    """Remove requests to an earlier engine, so that a new one does not read them."""
    for path in (*directory.control.glob("[0-9]*-*.json"), *directory.control.glob("*.asked")):
        path.unlink(missing_ok=True)


class ControlInbox:
    """Reads the requests to the engine of one run; each is returned once."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def poll(self) -> list[Request]:
        """The requests since the last call, oldest first; deletes their files. Cheap enough for every step."""
        return list(self._taken())

    def _taken(self) -> Iterator[Request]:
        for path in sorted(self._directory.control.glob("[0-9]*-*.json")):
            found = None
            try:
                found = _parse(read_table(path))
                path.unlink()
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                path.unlink(missing_ok=True)  # no request: it is ignored
            if found is not None:
                yield found


def _parse(found: dict[str, Any]) -> Request | None:
    """None for a table that is not a request."""
    fields = found.get("fields") or {}
    if found.get("request") not in REQUESTS or not isinstance(fields, dict):
        return None
    return Request(found["request"], str(found.get("time", "")), fields)


class RunRequests:
    def __init__(self, inbox: ControlInbox | None, writer: EventWriter | None, max_hours: float | None) -> None:
        """`max_hours` counts from now. `inbox` and `writer`, which records the answers, are None on other ranks than 0:
        those get their requests through `adopt`."""
        self._inbox, self._writer = inbox, writer
        self._deadline = time.monotonic() + max_hours * 3600 if max_hours else None
        self._signals = 0
        self.ending: str | None = None
        """Either "stop" or "pause"; None while the run should go on."""
        self.reason = ""
        self.checkpoint = False
        """A checkpoint was asked for; the loop clears it."""

    def poll(self) -> bool:
        """Take new requests and record whether each is accepted; True if the run should end. Fast enough for every
        step."""
        for request in self._inbox.poll() if self._inbox else ():
            accepted = self.ending is None
            if accepted and request.name == "checkpoint":
                self.checkpoint = True
            elif accepted:
                self._end(request.name, "asked for")
            reason = "after this step" if accepted else f"already ending ({self.ending})"
            if self._writer is not None:
                self._writer.write("control", request=request.name, accepted=accepted, reason=reason)
        if self._signals and self.ending is None:
            self._end("stop", BY_SIGNAL)
        if self._deadline is not None and time.monotonic() > self._deadline and self.ending is None:
            self._end("stop", "max_hours reached")
        return self.ending is not None

    def as_json(self) -> dict[str, Any]:
        """Rank 0 broadcasts it to the other ranks (`adopt`)."""
        return {"ending": self.ending, "reason": self.reason, "checkpoint": self.checkpoint}

    def adopt(self, requests: dict[str, Any]) -> bool:
        """Replace this rank's requests by rank 0's; True if the run should end."""
        self.ending, self.reason, self.checkpoint = requests["ending"], requests["reason"], requests["checkpoint"]
        return self.ending is not None

    def _end(self, how: str, reason: str) -> None:
        self.ending, self.reason = how, reason

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Inside the block, SIGTERM and SIGINT request a stop, SIGHUP (a closed terminal) nothing. Main thread only."""
        with calling_on_signal(self._on_signal):
            yield

    def _on_signal(self, _number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(KILLED_CODE)
