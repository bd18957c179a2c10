"""Which files of a run may be read or sent: regular ones inside its folder. A run may come from somebody else, and a
link in it could name any file of the user who opens it."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from engine.errors import UsageError
from engine.journal.directory import RUN_TOML
from engine.journal.stages import STAGE_FOLDER

MOST_ENTRIES = 100_000
"""Of a result's folder, where a few dozen are usual."""


def root_of(run: Path) -> Path:
    """Return the folder that files of the run at `run` may not leave: of a stage, the folder of the whole run."""
    parent = run.parent.parent
    is_stage = run.parent.name == "stages" and STAGE_FOLDER.match(run.name) and (parent / RUN_TOML).is_file()
    return parent if is_stage else run


def run_around(folder: Path) -> Path | None:
    """Return the run's folder in which `folder` is a result or a checkpoint's weights; None if it is in no run."""
    return next((place for place in folder.absolute().parents[:3] if (place / RUN_TOML).is_file()), None)


def is_inside(path: Path, run: Path) -> bool:
    """Return whether `path`, with all links followed, is in the folder of the run at `run`."""
    try:
        return path.resolve(strict=True).is_relative_to(root_of(run).resolve(strict=True))
    except (OSError, RuntimeError):  # a link to nothing, or to itself
        return False


def result_files(folder: Path, run: Path) -> list[Path]:
    """Return all files below `folder`, a part of the run at `run`, sorted; links to files inside the run are files.

    Raises UsageError with the name of an entry that may not be read: a link that leaves the run's folder, a link to a
    folder, or something other than a file, such as a pipe.
    """
    if not is_inside(folder, run):
        raise _outside(folder, run)
    found = []
    for path in _entries(folder):
        if path.is_symlink() and not is_inside(path, run):
            raise _outside(path, run)
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            found.append(path)
        elif path.is_symlink() or not stat.S_ISDIR(mode):
            raise UsageError(f"{path} is not a regular file", fix=f"remove it: rm {shlex.quote(str(path))}")
        if len(found) > MOST_ENTRIES:
            raise UsageError(f"{folder} has more than {MOST_ENTRIES:,} files", expected="the files of a result")
    return sorted(found)


def _entries(folder: Path) -> Iterator[Path]:
    """Yield what is below `folder`, without following links."""
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files))


def _outside(path: Path, run: Path) -> UsageError:
    place = root_of(run)
    name = path.relative_to(place) if path.is_relative_to(place) else path
    return UsageError(
        f"{name} links to a path outside the run's folder {place}",
        expected="the file itself in the run's folder",
        fix=f"if the run is yours, replace the link with a copy of the file; otherwise: rm {shlex.quote(str(path))}",
    )
