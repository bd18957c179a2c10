"""Lists runs, and finds the run that a RUN argument names.

Every start is recorded in the user's state folder, so that a run can be named from any directory. The records are
optional: if the state folder cannot be written, the user gets a warning, and runs are still found in the folder of
runs.

Try: `tunedeck show last`
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import tomli

from engine.errors import UsageError
from engine.journal.directory import RunDirectory
from engine.journal.stages import find_stage, stage_directories, stage_name

DIRECTORY_NAME = re.compile(r"^(\d{8}T\d{6}Z)-(.+)$")
"""TIMESTAMP-NAME, as `create_run` makes it."""

EXPECTED_RUN = "a path, a run's directory name, its --name, a unique prefix, or 'last'; RUN/STAGE for one stage"
LIST_RUNS = "list them: tunedeck runs"


def runs_folder(given: str | Path | None) -> Path:
    """The folder of runs: `given` (the option `--runs`), else $TUNEDECK_RUNS, else ./runs. Absolute."""
    return Path(given or os.environ.get("TUNEDECK_RUNS") or "runs").expanduser().absolute()


def state_folder() -> Path:
    """The folder in which starts of runs are recorded: $TUNEDECK_STATE, else the platform's folder for user state."""
    given = os.environ.get("TUNEDECK_STATE")
    if given:
        return Path(given).expanduser().absolute()
    return _platform_folder(os.environ.get("HOME"), os.environ.get("XDG_STATE_HOME"))


@lru_cache(maxsize=8)
def _platform_folder(home: str | None, state: str | None) -> Path:
    """The platform's folder for user state. Cached, because every plan asks for it; the arguments are the
    environment variables on which the folder depends."""
    from platformdirs import user_state_dir

    return Path(user_state_dir("tunedeck", appauthor=False))


def record_start(directory: RunDirectory) -> str | None:
    """Record the start of a run. Returns a warning for the user where the state folder cannot be written, else None."""
    line = json.dumps({"path": str(directory.path.absolute())}) + "\n"
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One write of a short line in append mode: lines of two starts at once do not mix.
        with (folder / "runs.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode())
    except OSError as error:
        return (
            f"the start could not be recorded in {folder} ({error.strerror or error}): "
            f"from other directories name this run by its path, {directory.path}"
        )
    return None


def recorded_runs() -> list[RunDirectory]:
    """List the recorded runs of this user that still exist, newest first. Empty if no record can be read."""
    try:
        lines = (state_folder() / "runs.jsonl").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(path for path in map(_recorded_path, lines) if path is not None)
    return _newest_first(RunDirectory(path) for path in paths)


def list_runs(runs_dir: Path) -> list[RunDirectory]:
    """The runs in a folder, newest first. Empty when the folder does not exist."""
    try:
        entries = [Path(entry.path) for entry in os.scandir(runs_dir) if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return _newest_first(RunDirectory(path.absolute()) for path in entries)


def resolve_run(text: str, runs_dir: Path | None) -> RunDirectory:
    """The run a user means by `text`: a path, a directory name, the newest run with that --name, a unique prefix of a
    directory name, or `last`.

    `runs_dir` is searched first, the user's recorded runs next, so that a project's own runs come first. Raises
    UsageError when no run matches, or several do.
    """
    if not text:
        raise UsageError("RUN is empty", expected=EXPECTED_RUN, fix=LIST_RUNS)
    if os.sep in text or text in (".", ".."):
        return _stage_of(text, runs_dir) or _at_path(Path(text).expanduser())
    places: list[Callable[[], list[RunDirectory]]] = [recorded_runs]
    if runs_dir is not None:
        places.insert(0, lambda: list_runs(runs_dir))
    for runs in places:
        found = _among(text, runs())
        if found is not None:
            return found
    if RunDirectory(Path(text)).exists():
        return _at_path(Path(text))
    raise UsageError(
        f"no run matches {text!r}" + (f" in {runs_dir} or among your earlier runs" if runs_dir else ""),
        expected=EXPECTED_RUN,
        fix=LIST_RUNS,
    )


def run_name(directory: RunDirectory) -> str:
    """The run's --name, from its spec; its directory's name where the spec cannot be read."""
    try:
        with directory.run_toml.open("rb") as file:
            return str(tomli.load(file)["name"])
    except (OSError, tomli.TOMLDecodeError, KeyError):
        return directory.name


def start_order(directory: RunDirectory) -> tuple[str, int]:
    """A sort key for runs by their time of creation: the time in the directory's name, then the time of `plan.json`,
    which is never rewritten."""
    try:
        written_ns = (directory.plan_json if directory.plan_json.exists() else directory.run_toml).stat().st_mtime_ns
    except OSError:
        written_ns = 0
    stamped = DIRECTORY_NAME.match(directory.name)
    if stamped:
        return stamped[1], written_ns
    return datetime.fromtimestamp(written_ns / 1e9, UTC).strftime("%Y%m%dT%H%M%SZ"), written_ns


def _among(text: str, runs: Sequence[RunDirectory]) -> RunDirectory | None:
    """The run that `text` names among `runs`, which are newest first; None if there is no match. Raises UsageError if
    several match."""
    if text == "last":
        return runs[0] if runs else None
    exact = [run for run in runs if run.name == text]
    if exact:
        return _require_one(text, exact)
    # A directory's name contains --name, but only the spec tells a run named `exp-2` from the second run named `exp`.
    for run in runs:
        if _name_part(run).startswith(text) and run_name(run) == text:
            return run
    starting = [run for run in runs if run.name.startswith(text)]
    return _require_one(text, starting) if starting else None


def _stage_of(text: str, runs_dir: Path | None) -> RunDirectory | None:
    """The stage that "RUN/NAME" means; None if the text is a path, or RUN names no run. Raises UsageError if the run
    has no such stage."""
    if Path(text).expanduser().exists() or text.startswith((".", "/", "~")):
        return None
    name, _, stage = text.rstrip(os.sep).rpartition(os.sep)
    try:
        run = resolve_run(name, runs_dir)
    except UsageError:
        return None
    found = find_stage(run, stage)
    if found is None:
        begun = ", ".join(map(stage_name, stage_directories(run)))
        raise UsageError(
            f"{run.name} has no stage {stage!r} that has begun",
            expected=f"one of: {begun}" if begun else "a run of several stages that has begun",
            fix=f"tunedeck show {run.name}",
        )
    return found


def _require_one(text: str, runs: Sequence[RunDirectory]) -> RunDirectory:
    if len(runs) == 1:
        return runs[0]
    raise UsageError(
        f"{text!r} could be any of {len(runs)} runs:\n" + "\n".join(f"  {run.path}" for run in runs[:10]),
        expected="one run",
        fix="give more of the name, or its path",
    )


def _name_part(run: RunDirectory) -> str:
    stamped = DIRECTORY_NAME.match(run.name)
    return stamped[2] if stamped else run.name


def _at_path(path: Path) -> RunDirectory:
    directory = RunDirectory(path.resolve())
    if directory.exists():
        return directory
    raise UsageError(
        f"{path} is not a run" + (": it has no run.toml" if path.is_dir() else ": no such folder"),
        expected="a run directory, such as runs/20261120T205800Z-demo",
        fix=LIST_RUNS,
    )


def _newest_first(runs: Iterable[RunDirectory]) -> list[RunDirectory]:
    return sorted((run for run in runs if run.exists()), key=start_order, reverse=True)


def _recorded_path(line: str) -> Path | None:
    """Parse one record; returns the path of the run, or None if the record is damaged."""
    try:
        return Path(json.loads(line)["path"])
    except (ValueError, KeyError, TypeError):
        return None
