"""Names that a shell completes: of runs and their stages, of profiles and of recipes.

A shell waits for these at every press of Tab, so they come from the names of files and folders alone, as far as that
tells them. Paths are left to the shell, which completes files where no name fits.

Try: `tunedeck --install-completion`, a new shell, then `tunedeck show <Tab>`
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from engine.config.files.find import SpecKind
    from engine.journal.directory import RunDirectory

SECOND_OF_ITS_NAME = re.compile(r"-\d+$")
"""Ends the folder of a second run with the same --name; a --name can end so, too."""


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """`last`, every --name and, once something is typed, every full name; behind `RUN/` the stages of that run."""
    from engine.journal.index import list_runs, runs_folder

    folder = runs_folder(_typed_folder(context))
    run, slash, _ = incomplete.rpartition("/")
    if slash:
        return _starting(incomplete, _stages(run, folder))
    runs = list_runs(folder)
    found = ["last"] if runs else []
    found += [name for each in runs if (name := _name_of(each))]
    if incomplete:
        found += [each.name for each in runs]
    return _starting(incomplete, found)


def profile_names(incomplete: str) -> list[str]:
    return _spec_names("profile", incomplete)


def recipe_names(incomplete: str) -> list[str]:
    return _spec_names("recipe", incomplete)


def names_in_group(context: typer.Context, incomplete: str) -> list[str]:
    """For the commands that `tunedeck profiles` and `tunedeck recipes` share."""
    group = context.parent.info_name if context.parent is not None else ""
    return _spec_names("profile" if group == "profiles" else "recipe", incomplete)


def _spec_names(kind: SpecKind, incomplete: str) -> list[str]:
    from engine.config.files.find import list_spec_files

    return _starting(incomplete, (file.name for file in list_spec_files(kind)))


def _typed_folder(context: typer.Context) -> Path | None:
    given = context.params.get("runs")
    return Path(given).expanduser() if given else None


def _name_of(run: RunDirectory) -> str:
    """Its --name, which is read from the spec only where the folder's name leaves it open."""
    from engine.journal.index import DIRECTORY_NAME, run_name

    stamped = DIRECTORY_NAME.match(run.name)
    if stamped is None or SECOND_OF_ITS_NAME.search(run.name):
        return run_name(run)
    return stamped[2]


def _stages(run: str, folder: Path) -> Iterator[str]:
    from engine.errors import UsageError
    from engine.journal.index import resolve_run
    from engine.journal.stages import stage_directories, stage_name

    try:
        directory = resolve_run(run, folder)
    except UsageError:
        return
    for stage in stage_directories(directory):
        yield f"{run}/{stage_name(stage)}"


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for name in names if name.startswith(incomplete)))
