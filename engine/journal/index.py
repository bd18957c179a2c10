"""Lists runs, finds the run that a RUN argument names, and moves deleted runs into the folder `.trash/`."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from engine.config.files.machine import path_of
from engine.config.files.trust import state_folder
from engine.errors import EnvironmentProblem, UsageError
from engine.journal.directory import IMPORTED, PLAN_JSON, RUN_TOML, RunDirectory, read_spec
from engine.journal.files import decode_json
from engine.journal.liveness import refuse_if_claimed
from engine.journal.stages import find_stage, stage_directories, stage_name

TRASH = ".trash"
"""The leading dot keeps the folder out of every list of runs."""


def move_to_trash(directory: RunDirectory) -> Path:
    """Returns the new path. Raises EnvironmentProblem if an engine works on the run, or the trash is not writable."""
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
            fix="get write permission there, or remove the folder by hand",
        ) from error
    raise AssertionError("count() never ends")


def newest_in_trash(runs_dir: Path) -> Path | None:
    """None if the trash is empty."""
    try:
        found = [(place.stat().st_ctime_ns, place) for place in (runs_dir / TRASH).iterdir() if place.is_dir()]
    except FileNotFoundError:
        return None
    return max(found)[1] if found else None


def restore_from_trash(place: Path) -> Path:
    """Returns the new path. Raises EnvironmentProblem if the name is taken, or the folder cannot be written."""
    target = place.parent.parent / place.name
    if target.exists():
        raise EnvironmentProblem(f"{target} already exists", fix=f"rename {place} and move it back by hand")
    try:
        os.rename(place, target)
    except OSError as error:
        raise EnvironmentProblem(
            f"{place} cannot be moved to {target}: {error.strerror or error}",
            fix="get write permission there, or move the folder by hand",
        ) from error
    return target


DIRECTORY_NAME = re.compile(r"^(\d{8}T\d{6}Z)-(.+)$")
"""TIMESTAMP-NAME, as `create_run` makes it."""

EXPECTED_RUN = "a path, a run's directory name, its --name, a unique prefix, or 'last'; RUN/STAGE for one stage"
LIST_RUNS = "list them: tunedeck runs"


def runs_folder(given: str | Path | None) -> Path:
    """`given` (the option `--runs`), else $TUNEDECK_RUNS, else ./runs. Absolute."""
    return Path(given or os.environ.get("TUNEDECK_RUNS") or "runs").expanduser().absolute()


def record_start(directory: RunDirectory) -> str | None:
    """Returns a warning where the state folder cannot be written."""
    line = json.dumps({"path": str(directory.path.absolute())}) + "\n"
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One write of a short line in append mode: lines of two starts at once do not mix.
        with (folder / "runs.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode())
    except OSError as error:
        return (
            f"the start could not be recorded in {folder} ({error.strerror or error}): in other directories, "
            f"use the path of this run, {directory.path}"
        )
    return None


def recorded_runs() -> list[RunDirectory]:
    """This user's recorded runs that still exist, newest first. Empty if no record can be read."""
    try:
        lines = (state_folder() / "runs.jsonl").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(path for path in map(_recorded_path, lines) if path is not None)
    return _newest_first(RunDirectory(path) for path in paths)


def list_runs(runs_dir: Path) -> list[RunDirectory]:
    """Newest first. Empty when the folder does not exist."""
    try:
        entries = [Path(entry.path) for entry in os.scandir(runs_dir) if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return _newest_first(RunDirectory(path.absolute()) for path in entries)


def resolve_run(text: str, runs_dir: Path | None, *, only_there: bool = False) -> RunDirectory:
    """The run that `text` means: a path; a full directory name, of any run that this user started; or among the runs of
    `runs_dir` (None: `runs_folder`) the newest run with that --name, a unique prefix of a directory name, or `last`.
    With `only_there`, because the user has named the folder, a run of `runs_dir` or none.

    Raises UsageError when no run matches, or several do. It names the runs of other folders that match.
    """
    if not text:
        raise UsageError("RUN is empty", expected=EXPECTED_RUN, fix=LIST_RUNS)
    folder = runs_dir or runs_folder(None)
    if os.sep in text or text in (".", ".."):
        run = _stage_of(text, folder, only_there) or _at_path(path_of(text))
        return _require_there(run, folder) if only_there else run
    found = _find(text, folder, only_there)
    if found is not None:
        return _require_there(found, folder) if only_there else found
    if not only_there and RunDirectory(path_of(text)).exists():
        return _at_path(path_of(text))
    raise _not_found(text, folder, only_there)


def _require_there(run: RunDirectory, folder: Path) -> RunDirectory:
    """Raise UsageError for a run outside `folder`, also by a link."""
    place = run.path.resolve()
    if place.is_relative_to(folder.resolve()):
        return run
    raise UsageError(
        f"{run.path} is a link to {place}, outside {folder}"
        if run.path.is_symlink()
        else f"{place} is not in {folder}",
        expected=f"a run in {folder}, which was given with --runs",
        fix=f"leave out --runs and use its path: {place}",
    )


def _find(text: str, runs_dir: Path, only_there: bool = False) -> RunDirectory | None:
    """By name; None if no run matches. Raises UsageError if several do, or the run of that name is damaged."""
    found = _among(text, list_runs(runs_dir))
    if found is not None or not DIRECTORY_NAME.match(text):
        return found
    if os.path.lexists(runs_dir / text):
        raise UsageError(
            f"{runs_dir / text} is damaged: it has no readable run.toml",
            expected="a run in this folder; one of the same name in another folder is not used",
            fix=f"move it away: mv {shlex.quote(str(runs_dir / text))} {shlex.quote(str(runs_dir / text))}.damaged",
        )
    named = [] if only_there else [run for run in recorded_runs() if run.name == text]
    return _require_one(text, named) if named else None


def _not_found(text: str, runs_dir: Path, only_there: bool) -> UsageError:
    elsewhere = _matching(text, recorded_runs())
    if not elsewhere:
        return UsageError(
            f"no run matches {text!r} in {runs_dir} or among your earlier runs", expected=EXPECTED_RUN, fix=LIST_RUNS
        )
    return UsageError(
        f"no run matches {text!r} in {runs_dir}; this command does not search other folders:\n"
        + "\n".join(f"  {run.path}" for run in elsewhere[:10]),
        expected="a run of this folder" + ("" if only_there else ", or the path or full directory name of any run"),
        fix=f"{'leave out --runs, and ' * only_there}give its full name: {elsewhere[0].name}"
        if DIRECTORY_NAME.match(elsewhere[0].name)
        else f"{'leave out --runs, and ' * only_there}give its path",
    )


def run_name(directory: RunDirectory) -> str:
    """--name of the spec; the directory's name where the spec cannot be read."""
    return str(read_spec(directory).get("name") or directory.name)


def start_order(directory: RunDirectory) -> tuple[str, int]:
    """Sort key by the time at which a run came into its folder: the time in the directory's name, but of an imported
    run that of the import, and never later than the run's files were written; then the time of `plan.json`, which is
    never rewritten."""
    stamped, written_ns, folder = DIRECTORY_NAME.match(directory.name), 0, str(directory.path)
    for name in (PLAN_JSON, RUN_TOML):  # joined as texts: a list of hundreds of runs is sorted every second
        with suppress(OSError):
            written_ns = _written_ns(os.stat(os.path.join(folder, name)))
            break
    with suppress(OSError):
        written_ns, stamped = _written_ns(os.stat(os.path.join(folder, IMPORTED))), None
    written = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(written_ns // 10**9))
    return min(stamped[1], written) if stamped else written, written_ns


def _written_ns(found: os.stat_result) -> int:
    """Return when a file was written. The second time is the kernel's own: nobody can set it to the future."""
    return min(found.st_mtime_ns, found.st_ctime_ns)


def _among(text: str, runs: Sequence[RunDirectory]) -> RunDirectory | None:
    """The match among `runs`, newest first. Raises UsageError if several match."""
    found = _matching(text, runs)
    return _require_one(text, found) if found else None


def _matching(text: str, runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """The matches among `runs`, newest first: several only for a prefix, or a name that runs of two folders have."""
    if text == "last":
        return list(runs[:1])
    exact = [run for run in runs if run.name == text]
    if exact:
        return exact
    # A directory's name contains --name, but only the spec tells a run named `exp-2` from the second run named `exp`.
    for run in runs:
        if _name_part(run).startswith(text) and run_name(run) == text:
            return [run]
    return [run for run in runs if run.name.startswith(text)]


def _stage_of(text: str, runs_dir: Path, only_there: bool) -> RunDirectory | None:
    """The stage that "RUN/NAME" means; None if the text is a path, or RUN names no run. Raises UsageError if the run
    has no such stage, or is in another folder."""
    if path_of(text).exists() or text.startswith((".", "/", "~")):
        return None
    name, _, stage = text.rstrip(os.sep).rpartition(os.sep)
    if not name or os.sep in name:
        return None
    run = _find(name, runs_dir, only_there)
    if run is None:
        if _matching(name, recorded_runs()):
            raise _not_found(name, runs_dir, only_there)
        return None
    found = find_stage(run, stage)
    if found is None:
        begun = ", ".join(map(stage_name, stage_directories(run)))
        raise UsageError(
            f"{run.name} has not started a stage {stage!r}",
            expected=f"one of: {begun}" if begun else "a run with several stages that has started",
            fix=f"tunedeck show {run.name}",
        )
    return found


def _require_one(text: str, runs: Sequence[RunDirectory]) -> RunDirectory:
    if len(runs) == 1:
        return runs[0]
    raise UsageError(
        f"{text!r} matches {len(runs)} runs:\n" + "\n".join(f"  {run.path}" for run in runs[:10]),
        expected="one run",
        fix="type more of the name, or the path",
    )


def _name_part(run: RunDirectory) -> str:
    stamped = DIRECTORY_NAME.match(run.name)
    return stamped[2] if stamped else run.name


def _at_path(path: Path) -> RunDirectory:
    directory = RunDirectory(path.resolve())
    if directory.exists():
        return directory
    run = RunDirectory(directory.path.parent)
    if run.exists() and (stage := find_stage(run, path.name)) is not None:
        return stage
    raise UsageError(
        f"{path} is not a run" + (": it has no run.toml" if path.is_dir() else ": no such folder"),
        expected="a run directory such as runs/20261120T205800Z-demo",
        fix=LIST_RUNS,
    )


def _newest_first(runs: Iterable[RunDirectory]) -> list[RunDirectory]:
    return sorted((run for run in runs if run.exists()), key=start_order, reverse=True)


def _recorded_path(line: str) -> Path | None:
    """None if the record is damaged."""
    try:
        found = decode_json(line.encode())
    except ValueError:
        return None
    path = found.get("path") if isinstance(found, dict) else None
    return Path(path) if isinstance(path, str) and "\0" not in path else None
