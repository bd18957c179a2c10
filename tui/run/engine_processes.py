"""The engine processes this console has started: starting them, and noticing that one ended.

They belong to nobody: each has its own session, and goes on when the console ends. While the console lives they are its
children, so it must wait for them, or they would stay behind as zombies.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.events import EventTail, end_of_events
from engine.journal.index import list_runs, record_start
from engine.journal.liveness import engine_process, is_alive
from engine.launch.process import engine_died, log_tail, start_engine


def still_running(runs_dir: Path) -> list[str]:
    """Names of the runs of a folder whose engine is seen alive: what goes on when the console is left."""
    return [directory.name for directory in list_runs(runs_dir) if _lives(directory)]


def _lives(directory: RunDirectory) -> bool:
    try:
        identity = engine_process(directory)
    except (EnvironmentProblem, OSError):
        return False
    return identity is not None and is_alive(identity)


@dataclass(frozen=True)
class _Child:
    directory: RunDirectory
    process: subprocess.Popen[bytes]
    log_start: int
    events_start: int


class Engines:
    """Children of this console."""

    def __init__(self) -> None:
        self._children: list[_Child] = []

    def start(self, directory: RunDirectory, *, resume: bool) -> str | None:
        """Start an engine on a run; a warning for the user, or None. Raises EnvironmentProblem, OSError."""
        from engine.launch.create_run import drop_untrusted_limits  # reads specs: too dear before the first paint

        foreign = drop_untrusted_limits(directory) if resume else None
        log_start = directory.log.stat().st_size if directory.log.exists() else 0
        events_start = end_of_events(directory.events)
        process = start_engine(directory, resume=resume)
        self._children.append(_Child(directory, process, log_start, events_start))
        notices = [notice for notice in (foreign, record_start(directory)) if notice]
        return "; ".join(notices) or None

    def ended_badly(self) -> list[str]:
        """Sentences about children that ended since the last call without recording how."""
        ended = [child for child in self._children if child.process.poll() is not None]
        self._children = [child for child in self._children if child not in ended]
        return [_last_words(child) for child in ended if not _recorded(child)]


def _recorded(child: _Child) -> bool:
    """Whether the engine wrote down how it ended; a run that is gone has nobody to tell."""
    if not child.directory.exists():
        return True
    events = EventTail(child.directory.events, offset=child.events_start).poll()
    return any(event["kind"] == "run_finished" for event in events)


def _last_words(child: _Child) -> str:
    """How it ended, and the line of its log that most likely says why."""
    how = engine_died(child.directory, child.process.returncode).found.splitlines()[0]
    said = log_tail(child.directory, start=child.log_start)
    complaints = [line for line in said if line.startswith("tunedeck: ")] or said[-1:]
    return "; ".join([how, *complaints[:1]])
