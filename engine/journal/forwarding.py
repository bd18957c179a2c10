"""The record of what a tracker or a webhook has of a run's journal, in the run's folder `trackers`."""

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
    seq: int = 0
    """The last event that was forwarded."""
    position: dict[str, Any] | None = None
    """What the tracker needs to continue the run (`Tracker.position`)."""
    error: str = ""
    """Why the last process that forwarded the run failed, else empty."""
    fix: str = ""


def record_file(directory: RunDirectory, name: str) -> Path:
    return directory.trackers / f"{name}.json"


def read_record(directory: RunDirectory, name: str) -> Record:
    """An empty record if there is no file. Raises EnvironmentProblem for a damaged one."""
    path = record_file(directory, name)
    try:
        return Record(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return Record()
    except (ValueError, TypeError) as error:
        raise EnvironmentProblem(
            f"{path} cannot be read: {error}", fix="remove it; all events are then sent to the tracker again"
        ) from error


def write_record(directory: RunDirectory, name: str, record: Record) -> None:
    """Raises OSError."""
    write_atomically(record_file(directory, name), json.dumps(asdict(record)) + "\n")
