"""Deleting a run: into `.trash/` of its runs folder first, for good only when that is emptied.

Try: `ls -a runs/.trash`
"""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path

from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.liveness import refuse_if_claimed

TRASH = ".trash"
"""Its name beside the runs; a leading dot keeps it out of every list."""


def move_to_trash(directory: RunDirectory) -> Path:
    """Move a run into the trash; returns where it is now.

    Raises EnvironmentProblem when an engine works on it, or the folder cannot be written.
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
            fix="give yourself the right to write there, or remove the folder by hand",
        ) from error
    raise AssertionError("count() never ends")


def empty_trash(runs_dir: Path) -> int:
    """Delete for good what is in the trash of a runs folder; returns how many runs that were."""
    trash = runs_dir / TRASH
    runs = list(trash.iterdir()) if trash.is_dir() else []
    for run in runs:
        shutil.rmtree(run)
    return len(runs)
