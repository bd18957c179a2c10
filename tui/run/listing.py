"""A list of runs, such as all runs of a folder, that is read in short slices and again only where a file changed.

A folder may have a thousand runs, and one of them a million steps. The names are listed at once; the summaries follow,
newest runs first. Refreshing an ended run then costs a few `stat` calls. What was read is kept for later consoles.

Try: `RunList.of_folder(Path("runs")).refresh(seconds=1.0)`
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.folder_summaries import FileStamp, FolderSummaries, file_stamp
from engine.journal.index import DIRECTORY_NAME, list_runs, start_order
from engine.journal.labels import Labels, read_labels
from engine.journal.summary import RunSummary, SummaryReader

LIVE = ("running", "stale")
"""States that a run can leave without a change of its files."""

RELIST_SECONDS = 1.0
"""While runs are read one after the other, the folder is listed again no more often than this."""

WRITE_SECONDS = 60.0
"""Summaries are kept for later consoles no more often than this."""

LISTED_IN_TURN = 50
"""Names of a folder that are looked at again whenever it is listed: a run.toml may have been removed, or its folder
replaced."""

SETTLED_NS = 2 * 10**9
"""Age from which on a folder's time changes with every later change, whatever the clock of its file system."""

CHECKED_FIRST, CHECKED_IN_TURN = 100, 100
"""Of the runs that have ended, the newest that are looked at for changes at every refresh, and how many of the others:
3,000 runs take half a minute, and a refresh takes no longer than with 200."""


@dataclass
class RunEntry:
    """One run of a list. `summary` is None until the journal has been read; `read_error` says why it cannot be read."""

    directory: RunDirectory
    reader: SummaryReader
    summary: RunSummary | None = None
    read_error: str = ""
    is_started: bool = False
    """Whether reading has begun: a run with a million steps takes many calls of `refresh`."""
    stamp: FileStamp = ()
    labels: Labels = field(default_factory=Labels)
    """Tags and note."""
    searched: tuple[object, object, dict[str, str]] | None = None
    """The summary and labels of which the texts were made that a filter is searched in, and these texts by field."""

    @property
    def stages(self) -> list[str]:
        """Names of the enabled stages of a staged run."""
        return self.summary.enabled_stages if self.summary is not None else []

    @property
    def sweep(self) -> str:
        """The id of the sweep to which the run belongs; empty if it belongs to none."""
        return self.summary.sweep if self.summary is not None else ""

    @property
    def changed(self) -> str:
        """The settings that were changed with --set or in the console: "max_steps=100 rank=8"."""
        return changed_settings(self.summary.overrides) if self.summary is not None else ""

    @property
    def is_read(self) -> bool:
        """Whether the run's journal was read to its end, or proved to be unreadable."""
        return self.summary is not None or bool(self.read_error)


class RunList:
    """The runs that the function `find` returns, with a summary of each."""

    def __init__(self, find: Callable[[], list[RunDirectory]], kept: FolderSummaries | None = None) -> None:
        """`kept` has summaries of earlier processes, and takes new ones."""
        self._find, self._kept = find, kept
        self._written_at = -inf
        self._entries: dict[Path, RunEntry] = {}
        self._listed_at = -inf
        self.read_error = ""
        """Why the folder cannot be listed; empty when it can."""
        self.version = 0
        """Changes whenever an entry or the list changes."""
        self._turn = 0
        """Of the runs that are looked at in turn, the first at the next refresh."""

    @classmethod
    def of_folder(cls, runs_dir: Path) -> RunList:
        """A list of all runs in one folder."""
        return cls(RunFolder(runs_dir).runs, FolderSummaries(runs_dir))

    @property
    def entries(self) -> list[RunEntry]:
        """All entries, in the order in which `find` returned the runs."""
        return list(self._entries.values())

    def has(self, path: Path) -> bool:
        """Whether there is a run with this path."""
        return path in self._entries

    @property
    def unread(self) -> int:
        """The number of runs that have not been read to the end of their journals yet."""
        return sum(not entry.is_read for entry in self._entries.values())

    def refresh(self, *, seconds: float) -> bool:
        """List the runs again, while some are unread at most once in RELIST_SECONDS, and read new and changed ones for
        about `seconds`; returns whether anything changed."""
        began = time.monotonic()
        catching_up = self.unread and began - self._listed_at < RELIST_SECONDS
        changed = False if catching_up else self._relist()
        deadline = time.monotonic() + seconds
        for entry in self._entries_to_read():
            changed = self._read(entry, max(0.0, deadline - time.monotonic())) or changed
            if time.monotonic() > deadline:
                break
        self._keep()
        return changed

    def _keep(self) -> None:
        if self._kept is not None and not self.unread and time.monotonic() - self._written_at > WRITE_SECONDS:
            self._written_at = time.monotonic()
            self._kept.write(entry.directory for entry in self.entries)

    def _relist(self) -> bool:
        try:
            directories = self._find()
        except OSError as error:
            self.read_error = f"{error.filename or 'the runs folder'} cannot be read: {error.strerror or error}"
            return False
        self.read_error, self._listed_at = "", time.monotonic()
        if len(directories) == len(self._entries) and all(
            known is directory.path for known, directory in zip(self._entries, directories, strict=True)
        ):
            return False
        self.version += 1
        before = list(self._entries)
        self._entries = {
            directory.path: self._entries.get(directory.path) or RunEntry(directory, SummaryReader(directory))
            for directory in directories
        }
        return before != list(self._entries)

    def _entries_to_read(self) -> Iterator[RunEntry]:
        """Yield the entries to read: first runs never read, then runs that may have changed, last long runs that are
        read in part."""
        unread = [entry for entry in self.entries if not entry.is_read]
        yield from (entry for entry in unread if not entry.is_started)
        ended: list[RunEntry] = []
        for entry in self.entries:
            if entry.summary is not None and entry.summary.status in LIVE:
                yield entry
            elif entry.is_read:
                ended.append(entry)
        others = ended[CHECKED_FIRST:]
        in_turn = [*others[self._turn :], *others[: self._turn]][:CHECKED_IN_TURN]
        self._turn = (self._turn + len(in_turn)) % len(others) if others else 0
        for entry in (*ended[:CHECKED_FIRST], *in_turn):
            if file_stamp(entry.directory) != entry.stamp:
                yield entry
        yield from (entry for entry in unread if entry.is_started)

    def _read(self, entry: RunEntry, seconds: float) -> bool:
        before, stamp = (entry.summary, entry.read_error, entry.labels), file_stamp(entry.directory)
        is_started, entry.is_started = entry.is_started, True
        known = self._kept.known(entry.directory) if self._kept is not None and not is_started else None
        try:
            if known is None and not entry.reader.read(seconds=seconds):
                return not is_started
            entry.summary, entry.read_error = known or entry.reader.summary(), ""
            entry.labels = read_labels(entry.directory)
            if known is None and self._kept is not None:
                self._kept.take(entry.directory, stamp, entry.summary)
        except TunedeckError as error:
            entry.read_error = error.found
        except OSError as error:
            entry.read_error = f"cannot be read: {error.strerror or error}"
        entry.stamp = stamp
        has_changed = (entry.summary, entry.read_error, entry.labels) != before
        self.version += has_changed
        return has_changed


class RunFolder:
    """Lists the runs of a folder. Where it has changed, names are listed, and new runs are put among the others."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._stamp: tuple[int, int] | None = None
        self._known: dict[str, tuple[tuple[str, int], RunDirectory]] = {}
        """By name, newest first: what it is sorted by, and the run."""
        self._others: list[str] = []
        """The names that are not runs."""
        self._turn = 0
        """The index of the next name to check again."""

    def runs(self) -> list[RunDirectory]:
        """Return what `list_runs` returns; an old run of which run.toml was removed is noticed later."""
        try:
            found = os.stat(self._runs_dir)
        except OSError:
            self._stamp, self._known, self._others = None, {}, []
            return list_runs(self._runs_dir)
        names = [*self._known, *self._others]
        again = names[self._turn : self._turn + LISTED_IN_TURN]
        self._turn = self._turn + len(again) if self._turn + len(again) < len(names) else 0
        if (found.st_mtime_ns, found.st_ino) != self._stamp:
            with os.scandir(self._runs_dir) as entries:
                there = {entry.name for entry in entries if not entry.name.startswith(".")}
            self._leave_out(self._known.keys() - there)
            self._others = [name for name in there if name not in self._known]
            again = [name for name in again if name in self._known] + self._others
        self._look_at(again)
        settled = time.time_ns() - found.st_mtime_ns > SETTLED_NS
        self._stamp = (found.st_mtime_ns, found.st_ino) if settled else None
        return [run for _, run in self._known.values()]

    def _leave_out(self, names: Collection[str]) -> None:
        if names:
            self._known = {name: row for name, row in self._known.items() if name not in names}

    def _look_at(self, names: Iterable[str]) -> None:
        """Find what is a run, and what is one no longer, among the names of the folder."""
        changed: dict[str, tuple[tuple[str, int], RunDirectory]] = {}
        for name in names:
            known = self._known.get(name)
            run = known[1] if known else RunDirectory((self._runs_dir / name).absolute())
            if not run.exists():
                self._leave_out({name} & self._known.keys())
                self._others += [] if name in self._others else [name]
            elif known is None or known[0] != start_order(run):
                changed[name] = start_order(run), run
        if changed:
            rows = {**self._known, **changed}
            self._known = dict(sorted(rows.items(), key=lambda row: row[1][0], reverse=True))
            self._others = [name for name in self._others if name not in changed]


def changed_settings(overrides: Iterable[str]) -> str:
    """Overrides KEY=VALUE, each with the last part of its key alone."""
    parts = [str(override).partition("=") for override in overrides]
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in parts)


def short_name(directory: RunDirectory) -> str:
    """The run's name without the time that its directory's name begins with."""
    found = DIRECTORY_NAME.match(directory.name)
    return found[2] if found else directory.name
