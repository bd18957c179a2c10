"""`trackers/NAME.json` of a run directory: what a tracker has of the run, remembered between processes."""

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
    """What one tracker has of a run."""

    seq: int = 0
    """`seq` of the last event that was forwarded."""
    position: dict[str, Any] | None = None
    """What the tracker needs to continue the run; None before its first start."""
    error: str = ""
    """Why the last process ended early; empty if it did not."""
    fix: str = ""
    """What to do about `error`."""


def record_file(directory: RunDirectory, name: str) -> Path:
    """The file of tracker `name`."""
    return directory.trackers / f"{name}.json"


def read_record(directory: RunDirectory, name: str) -> Record:
    """Read what tracker `name` has of a run. Raises EnvironmentProblem for a damaged file."""
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
    """Write what tracker `name` has of a run. Raises OSError."""
    write_atomically(record_file(directory, name), json.dumps(asdict(record)) + "\n")
