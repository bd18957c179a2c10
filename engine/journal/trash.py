"""Deletes a run: its directory is moved into the folder `.trash/` beside it, and can be moved back.

Try: `ls -a runs/.trash`
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.liveness import refuse_if_claimed

TRASH = ".trash"
"""Name of the trash folder; the leading dot keeps it out of every list of runs."""


def move_to_trash(directory: RunDirectory) -> Path:
    """Move a run into the trash; returns its new path.

    Raises EnvironmentProblem if an engine works on the run, or the folder cannot be written.
    """
    trash = directory.path.parent / TRASH
    try:
        refuse_if_claimed(directory)
        trash.mkdir(exist_ok=True)
        for number in count(1):
            place = trash / (directory.name if number == 1 else f"{directory.name}-{number}")
            if not place.exists():
                os.rename(directory.path, place)
                return place
    except OSError as error:
        raise EnvironmentProblem(
            f"{directory.path} cannot be moved to {trash}: {error.strerror or error}",
            fix="give yourself permission to write there, or remove the folder by hand",
        ) from error
    raise AssertionError("count() never ends")


def newest_in_trash(runs_dir: Path) -> Path | None:
    """The run that was moved last into the trash of the folder `runs_dir`; None if the trash is empty."""
    try:
        found = [(place.stat().st_ctime_ns, place) for place in (runs_dir / TRASH).iterdir() if place.is_dir()]
    except FileNotFoundError:
        return None
    return max(found)[1] if found else None


def restore_from_trash(place: Path) -> Path:
    """Move the run `place` out of the trash into the folder it came from; returns its new path.

    Raises EnvironmentProblem if a run has that name already, or the folder cannot be written.
    """
    target = place.parent.parent / place.name
    if target.exists():
        raise EnvironmentProblem(f"{target} exists already", fix=f"rename {place} and move it back by hand")
    try:
        os.rename(place, target)
    except OSError as error:
        raise EnvironmentProblem(
            f"{place} cannot be moved to {target}: {error.strerror or error}",
            fix="give yourself permission to write there, or move the folder by hand",
        ) from error
    return target
