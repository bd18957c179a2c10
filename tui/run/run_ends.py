"""Notices the runs of a folder that end while the console is open.

Try: `ends = RunEnds(Path("runs")); ends.poll()`, then again after a run has ended.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import TunedeckError
from engine.journal.event_text import clean
from engine.journal.index import list_runs
from engine.journal.summary import RunSummary, summarise
from tui.run.engine_processes import running_runs

ASKED_FOR = ("paused", "stopped", "queued")
"""States that need no notification, because the user asked for them."""


class RunEnds:
    """Finds the runs of a folder that end while the console is open: it compares the runs that have an engine with
    those at the last `poll`."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._running: set[str] | None = None

    def poll(self) -> list[str]:
        """A sentence for each run that has ended since the last call, such as "20260724T101500Z-demo: done", or how it
        failed. Runs that were paused or stopped are left out; so is a folder that cannot be read."""
        try:
            running = set(running_runs(self._runs_dir))
            ended = (self._running or set()) - running
            found = [summarise(run) for run in list_runs(self._runs_dir) if run.name in ended] if ended else []
        except (TunedeckError, OSError):
            return []
        # A run whose engine was killed counts as running until it has written nothing for some seconds.
        self._running = running | {summary.run for summary in found if summary.status == "running"}
        return [_sentence(summary) for summary in found if summary.status not in (*ASKED_FOR, "running")]


def _sentence(summary: RunSummary) -> str:
    how = {"oom": "out of memory", "stale": "its engine has ended"}.get(summary.status)
    error = next(iter((summary.last_error or "").splitlines()), "")
    return clean(f"{summary.run}: {how or summary.status}" + (f": {error}" if error and not how else ""))
