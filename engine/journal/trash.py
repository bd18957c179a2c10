"""Deletes a run: its directory is moved into the folder `.trash/` beside it, from where a user can move it back.

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
