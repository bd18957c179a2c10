"""Notices the runs of a folder that end while the console is open.

Try: `ends = RunEnds(Path("runs")); ends.poll()`, then again after a run has ended.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.journal.summary import RunSummary, summarise
from tui.run.engine_processes import has_engine
from tui.run.listing import RunFolder

ASKED_FOR = ("paused", "stopped", "queued")
"""States that need no notification, because the user asked for them."""

CHECKED_FIRST, CHECKED_IN_TURN = 100, 300
"""The newest runs, whose engines are looked for at every poll, and how many of the others."""


class RunEnds:
    """Finds the runs of a folder that end while the console is open: it compares the runs that have an engine with
    those at the last `poll`."""

    def __init__(self, runs_dir: Path) -> None:
        self._folder = RunFolder(runs_dir)
        self._running: dict[str, RunDirectory] | None = None
        self._turn = 0
        """The index of the next older run to check."""

    def poll(self) -> list[str]:
        """A sentence for each run that has ended since the last call, such as "20260724T101500Z-demo: done", or how it
        failed. Runs that were paused or stopped are left out; so is a folder that cannot be read."""
        before = self._running or {}
        try:
            running = {run.name: run for run in self._looked_at() if has_engine(run)}
            found = [summarise(run) for name, run in before.items() if name not in running and run.exists()]
        except (TunedeckError, OSError):
            return []
        # A run whose engine was killed counts as running until it has written nothing for some seconds.
        self._running = running | {each.run: before[each.run] for each in found if each.status == "running"}
        return [_sentence(summary) for summary in found if summary.status not in (*ASKED_FOR, "running")]

    def _looked_at(self) -> list[RunDirectory]:
        """Return all runs at first, then those that were running, the newest ones, and some of the others in turn:
        3,000 runs take no longer than 400."""
        runs = self._folder.runs()
        if self._running is None:
            return runs
        others = runs[CHECKED_FIRST:]
        in_turn = others[self._turn : self._turn + CHECKED_IN_TURN]
        self._turn = self._turn + len(in_turn) if self._turn + len(in_turn) < len(others) else 0
        return [*self._running.values(), *runs[:CHECKED_FIRST], *in_turn]


def _sentence(summary: RunSummary) -> str:
    how = {"oom": "out of memory", "stale": "its engine has ended"}.get(summary.status)
    error = next(iter((summary.last_error or "").splitlines()), "")
    return clean(f"{summary.run}: {how or summary.status}" + (f": {error}" if error and not how else ""))
