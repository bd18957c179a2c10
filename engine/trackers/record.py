"""The record of a tracker, `trackers/NAME.json` of a run directory: which events were forwarded, remembered between
processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.files import write_atomically


@dataclass
class Record:
    """What was forwarded of one run to one tracker."""

    seq: int = 0
    """`seq` of the last event that was forwarded."""
    position: dict[str, Any] | None = None
    """What the tracker needs to continue the run (`Tracker.position`); None if nothing was forwarded yet."""
    error: str = ""
    """Why the last process that forwarded the run failed; empty if it did not fail."""
    fix: str = ""
    """What the user can do about `error`."""


def record_file(directory: RunDirectory, name: str) -> Path:
    """Return the path of the record of tracker `name` in the run directory."""
    return directory.trackers / f"{name}.json"


def read_record(directory: RunDirectory, name: str) -> Record:
    """Read the record of tracker `name`; an empty one if there is no file. Raises EnvironmentProblem for a damaged
    file."""
    path = record_file(directory, name)
    try:
        return Record(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return Record()
    except (ValueError, TypeError) as error:
        raise EnvironmentProblem(
            f"{path} cannot be read: {error}", fix="remove it; the tracker then gets every event again"
        ) from error


def write_record(directory: RunDirectory, name: str, record: Record) -> None:
    """Write the record of tracker `name`. Raises OSError."""
    write_atomically(record_file(directory, name), json.dumps(asdict(record)) + "\n")
