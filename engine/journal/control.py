"""Requests to a running engine: a file each in `control/`, taken once, answered by `control` events.

A file works from another terminal, another machine that shares the disk, and a console that dies right after; a
signal would not. The engine looks between steps. Answering is the engine's business.

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
"""What can be asked for."""


@dataclass(frozen=True)
class Request:
    """One request, as it was asked."""

    name: str
    time: str
    fields: dict[str, Any] = field(default_factory=dict)


def send_request(directory: RunDirectory, name: str, **fields: Any) -> None:
    """Ask the engine of this run for `name`. Raises ValueError for an unknown name, OSError on a full disk."""
    if name not in REQUESTS:
        raise ValueError(f"no such request: {name!r}; known: {', '.join(REQUESTS)}")
    directory.control.mkdir(exist_ok=True)
    # Names sort in the order of asking; two askers in one nanosecond would ask for the same anyway.
    path = directory.control / f"{time.time_ns():020d}-{name}.json"
    write_atomically(path, json.dumps({"request": name, "time": utc_now(), "fields": fields}) + "\n")
    (directory.control / f"{name}.asked").touch()


def pending(directory: RunDirectory) -> list[str]:
    """Names of the requests that the engine has not taken yet, oldest first."""
    return [path.stem.partition("-")[2] for path in sorted(directory.control.glob("[0-9]*-*.json"))]


def was_requested(directory: RunDirectory, name: str) -> bool:
    """Whether the present engine was asked for `name`, taken or not.

    A mark of its own, because between the taking of a request and the event that answers it neither can be seen.
    """
    return (directory.control / f"{name}.asked").exists()


def clear_requests(directory: RunDirectory) -> None:
    """Forget every request: what was asked of an engine that is gone is not meant for its successor."""
    for path in (*directory.control.glob("[0-9]*-*.json"), *directory.control.glob("*.asked")):
        path.unlink(missing_ok=True)


class ControlInbox:
    """The engine's side: hands out each request once."""

    def __init__(self, directory: RunDirectory) -> None:
        self._folder = directory.control

    def poll(self) -> list[Request]:
        """The requests that came since the last look, oldest first. One listing of a folder: cheap at every step."""
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
    """The request in a file; None for one that no version of ours has written (they are dropped, not obeyed)."""
    try:
        found = json.loads(text)
        known = found["request"] in REQUESTS
    except (ValueError, KeyError, TypeError):
        return None
    return Request(found["request"], str(found.get("time", "")), dict(found.get("fields") or {})) if known else None
