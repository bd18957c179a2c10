"""The engine processes that this console has started: starting them, and noticing when one ended.

Each engine runs in a session of its own (setsid) and continues when the console ends. While the console runs, engines
are its child processes, so the console must poll them: otherwise an ended engine would remain as a zombie.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from engine.journal.directory import RunDirectory
from engine.journal.events import EventTail, end_of_events
from engine.journal.index import list_runs, record_start
from engine.journal.liveness import running_engine
from engine.launch.process import engine_died, log_tail, start_engine


def running_runs(runs_dir: Path) -> list[str]:
    """Names of the runs in a folder whose engine process is alive. These runs continue when the user leaves the
    console."""
    return [directory.name for directory in list_runs(runs_dir) if has_engine(directory)]


def has_engine(directory: RunDirectory) -> bool:
    """Return whether the engine process of a run is alive."""
    # Most runs have ended, and have no record of an engine. Joined as texts: hundreds are looked at every few seconds.
    return os.path.exists(f"{directory.path}/{directory.engine.name}") and running_engine(directory) is not None


@dataclass(frozen=True)
class _Child:
    directory: RunDirectory
    process: subprocess.Popen[bytes]
    log_start: int
    events_start: int


class EngineProcesses:
    """The engine processes that this console has started."""

    def __init__(self) -> None:
        self._children: list[_Child] = []

    def start(self, directory: RunDirectory, *, resume: bool) -> str | None:
        """Start an engine process on a run, or with `resume` on a run to be continued; returns warnings for the user,
        None if there are none. Raises EnvironmentProblem or OSError if the engine cannot be started."""
        from engine.launch.create_run import drop_untrusted_limits  # slow to import: not before the first paint

        untrusted = drop_untrusted_limits(directory) if resume else None
        log_start = directory.log.stat().st_size if directory.log.exists() else 0
        events_start = end_of_events(directory.events)
        process = start_engine(directory, resume=resume)
        self._children.append(_Child(directory, process, log_start, events_start))
        notices = [notice for notice in (untrusted, record_start(directory)) if notice]
        return "; ".join(notices) or None

    def unrecorded_ends(self) -> list[str]:
        """A message for each process that ended since the last call without recording in the run directory how the run
        ended."""
        ended = [child for child in self._children if child.process.poll() is not None]
        self._children = [child for child in self._children if child not in ended]
        return [_end_message(child) for child in ended if not _has_recorded_end(child)]


def _has_recorded_end(child: _Child) -> bool:
    """Whether the engine recorded how the run ended; also true if the run directory no longer exists."""
    if not child.directory.exists():
        return True
    events = EventTail(child.directory.events, offset=child.events_start).poll()
    return any(event["kind"] == "run_finished" for event in events)


def _end_message(child: _Child) -> str:
    """Return a message that says how the process ended, with the line of its log that most likely gives the reason."""
    how = engine_died(child.directory, child.process.returncode).found.splitlines()[0]
    log = log_tail(child.directory, start=child.log_start)
    errors = [line for line in log if line.startswith("tunedeck: ")] or log[-1:]
    return "; ".join([how, *errors[:1]])
