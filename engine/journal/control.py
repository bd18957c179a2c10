"""Requests to a running engine: each is a file in the run's `control/`, which the engine reads once, deletes, and
answers with `control` events.

Unlike a signal, a file can be sent from another machine that shares the disk, and its sender may end right after. The
engine reads requests between steps and answers them; this module only stores them.

Try: `tunedeck checkpoint last`
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.journal.directory import RunDirectory
from engine.journal.events import utc_now
from engine.journal.files import write_atomically

REQUESTS = ("stop", "pause", "checkpoint")
"""Names of the requests that an engine understands."""


@dataclass(frozen=True)
class Request:
    """One request to an engine: its name ("stop", "pause", …), the time at which it was sent (UTC, ISO 8601), and
    further fields."""

    name: str
    time: str
    fields: dict[str, Any] = field(default_factory=dict)


def send_request(directory: RunDirectory, name: str, **fields: Any) -> None:
    """Send a request to the engine of this run. Raises ValueError for an unknown name, OSError on a full disk."""
    if name not in REQUESTS:
        raise ValueError(f"no such request: {name!r}; known: {', '.join(REQUESTS)}")
    directory.control.mkdir(exist_ok=True)
    # File names sort in the order of sending.
    path = directory.control / f"{time.time_ns():020d}-{name}.json"
    write_atomically(path, json.dumps({"request": name, "time": utc_now(), "fields": fields}) + "\n")
    (directory.control / f"{name}.asked").touch()


def was_requested(directory: RunDirectory, name: str) -> bool:
    """Whether request `name` was sent since `clear_requests`, even if the engine has read and deleted the request file.

    A separate file records this, because no event reports a request before the engine answers it.
    """
    return (directory.control / f"{name}.asked").exists()


def clear_requests(directory: RunDirectory) -> None:
    """Remove all requests, so that a new engine does not read those that were sent to the one before."""
    for path in (*directory.control.glob("[0-9]*-*.json"), *directory.control.glob("*.asked")):
        path.unlink(missing_ok=True)


class ControlInbox:
    """Reads the requests to the engine of one run; each is returned once."""

    def __init__(self, directory: RunDirectory) -> None:
        self._folder = directory.control

    def poll(self) -> list[Request]:
        """Return the requests since the last call, oldest first, and delete their files. Lists one folder, which is
        cheap enough for every step."""
        return list(self._taken())

    def _taken(self) -> Iterator[Request]:
        for path in sorted(self._folder.glob("[0-9]*-*.json")):
            try:
                text = path.read_text("utf-8")
                path.unlink()
            except FileNotFoundError:
                continue
            found = _parse(text)
            if found is not None:
                yield found


def _parse(text: str) -> Request | None:
    """Parse the content of a request file; returns None for text that is not a request, which is ignored."""
    try:
        found = json.loads(text)
        known = found["request"] in REQUESTS
    except (ValueError, KeyError, TypeError):
        return None
    return Request(found["request"], str(found.get("time", "")), dict(found.get("fields") or {})) if known else None
