"""All runs of a folder, read a little at a time and read again only where something changed.

A folder may hold a thousand runs, and one of them a million steps. The list is complete at once with names and times;
the rest follows, newest runs first, in slices of a few hundredths of a second. A run that has ended costs one `stat` a
look from then on. Nothing here draws or writes.

Try: `RunList(Path("runs")).refresh(seconds=1.0)`
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.index import list_runs
from engine.journal.summary import RunSummary, SummaryReader

LIVE = ("queued", "running", "stale")
"""States that can change without a new line in the event file."""

Mark = tuple[int, ...]


@dataclass
class Entry:
    """One run of the list. `summary` is None until it was read, and `trouble` says why it cannot be."""

    directory: RunDirectory
    reader: SummaryReader
    summary: RunSummary | None = None
    trouble: str = ""
    begun: bool = False
    """Whether reading it has begun: one with a million steps takes many looks."""
    mark: Mark = ()

    @property
    def known(self) -> bool:
        """Whether it was read to its end, or why it cannot be is known."""
        return self.summary is not None or bool(self.trouble)


class RunList:
    """The runs that `find` names, newest first, with what is known of each."""

    def __init__(self, find: Callable[[], list[RunDirectory]]) -> None:
        self._find = find
        self._entries: dict[Path, Entry] = {}
        self.trouble = ""
        """Why the folder cannot be listed; empty when it can."""

    @classmethod
    def of_folder(cls, runs_dir: Path) -> RunList:
        """The runs in one folder."""
        return cls(lambda: list_runs(runs_dir))

    @property
    def entries(self) -> list[Entry]:
        """All entries, newest first."""
        return list(self._entries.values())

    @property
    def unread(self) -> int:
        """How many runs have not been looked at yet."""
        return sum(not entry.known for entry in self._entries.values())

    def refresh(self, *, seconds: float) -> bool:
        """Look for runs that came or went, and read what changed for about this long. True when anything changed."""
        changed = self._relist()
        deadline = time.monotonic() + seconds
        for entry in self._due():
            changed = self._read(entry, max(0.0, deadline - time.monotonic())) or changed
            if time.monotonic() > deadline:
                break
        return changed

    def _relist(self) -> bool:
        try:
            directories = self._find()
        except OSError as error:
            self.trouble = f"{error.filename or 'the runs folder'} cannot be read: {error.strerror or error}"
            return False
        self.trouble = ""
        before = list(self._entries)
        self._entries = {
            directory.path: self._entries.get(directory.path) or Entry(directory, SummaryReader(directory))
            for directory in directories
        }
        return before != list(self._entries)

    def _due(self) -> Iterator[Entry]:
        """First what was never looked at, then what may have changed, at last the long ones that are being read."""
        unread = [entry for entry in self.entries if not entry.known]
        yield from (entry for entry in unread if not entry.begun)
        for entry in self.entries:
            live = entry.summary is not None and entry.summary.status in LIVE
            if entry.known and (live or _mark(entry.directory) != entry.mark):
                yield entry
        yield from (entry for entry in unread if entry.begun)

    def _read(self, entry: Entry, seconds: float) -> bool:
        before, mark = (entry.summary, entry.trouble), _mark(entry.directory)
        begun, entry.begun = entry.begun, True
        try:
            if not entry.reader.read(seconds=seconds):
                return not begun
            entry.summary, entry.trouble = entry.reader.summary(), ""
        except TunedeckError as error:
            entry.trouble = error.found
        except OSError as error:
            entry.trouble = f"cannot be read: {error.strerror or error}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            entry.trouble = f"its events are not ours: {type(error).__name__}"
        entry.mark = mark
        return (entry.summary, entry.trouble) != before


def _mark(directory: RunDirectory) -> Mark:
    """Changes when anything that a summary is made from does."""
    return tuple(number for path in (directory.events, directory.engine, directory.control) for number in _stat(path))


def _stat(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)
