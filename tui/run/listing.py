"""A list of runs, such as all runs of a folder, that is read in short slices and again only where a file changed.

A folder may have a thousand runs, and one of them a million steps. The names are listed at once; the summaries follow,
newest runs first. Refreshing an ended run then costs three `stat` calls. Nothing here draws or writes.

Try: `RunList.of_folder(Path("runs")).refresh(seconds=1.0)`
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory, read_spec
from engine.journal.index import DIRECTORY_NAME, list_runs
from engine.journal.labels import Labels, read_labels
from engine.journal.summary import RunSummary, SummaryReader

LIVE = ("queued", "running", "stale")
"""States that a run can leave without a new line in its journal."""

RELIST_SECONDS = 1.0
"""While runs are read one after the other, the folder is listed again no more often than this."""

FileStamp = tuple[int, ...]


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
    stages: tuple[str, ...] = ()
    """Names of the enabled stages of a staged run."""
    sweep: str = ""
    """The id of the sweep to which the run belongs; empty if it belongs to none."""
    labels: Labels = field(default_factory=Labels)
    """Tags and note."""
    changed: str = ""
    """The settings that were changed with --set or in the console: "max_steps=100 rank=8"."""

    @property
    def is_read(self) -> bool:
        """Whether the run's journal was read to its end, or proved to be unreadable."""
        return self.summary is not None or bool(self.read_error)


class RunList:
    """The runs that the function `find` returns, with a summary of each."""

    def __init__(self, find: Callable[[], list[RunDirectory]]) -> None:
        self._find = find
        self._entries: dict[Path, RunEntry] = {}
        self._listed_at = -inf
        self.read_error = ""
        """Why the folder cannot be listed; empty when it can."""

    @classmethod
    def of_folder(cls, runs_dir: Path) -> RunList:
        """A list of all runs in one folder."""
        return cls(lambda: list_runs(runs_dir))

    @property
    def entries(self) -> list[RunEntry]:
        """All entries, in the order in which `find` returned the runs."""
        return list(self._entries.values())

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
        return changed

    def _relist(self) -> bool:
        try:
            directories = self._find()
        except OSError as error:
            self.read_error = f"{error.filename or 'the runs folder'} cannot be read: {error.strerror or error}"
            return False
        self.read_error, self._listed_at = "", time.monotonic()
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
        for entry in self.entries:
            live = entry.summary is not None and entry.summary.status in LIVE
            if entry.is_read and (live or _file_stamp(entry.directory) != entry.stamp):
                yield entry
        yield from (entry for entry in unread if entry.is_started)

    def _read(self, entry: RunEntry, seconds: float) -> bool:
        before, stamp = (entry.summary, entry.read_error), _file_stamp(entry.directory)
        is_started, entry.is_started = entry.is_started, True
        try:
            if not entry.reader.read(seconds=seconds):
                return not is_started
            entry.summary, entry.read_error = entry.reader.summary(), ""
            spec = read_spec(entry.directory)
            entry.stages, entry.sweep = stage_names(spec), str(nested(spec, "provenance", "sweep", "id") or "")
            entry.changed, entry.labels = changed_settings(spec), read_labels(entry.directory)
        except TunedeckError as error:
            entry.read_error = error.found
        except OSError as error:
            entry.read_error = f"cannot be read: {error.strerror or error}"
        entry.stamp = stamp
        return (entry.summary, entry.read_error) != before


def stage_names(spec: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the enabled stages in `spec`, the tables of a run.toml; empty for a run without stages."""
    stages = nested(spec, "recipe", "stages") or []
    return tuple(str(stage.get("name")) for stage in stages if isinstance(stage, dict) and stage.get("enabled", True))


def changed_settings(spec: dict[str, Any]) -> str:
    """The overrides in `spec`, the tables of a run.toml, each with the last part of its key alone."""
    overrides = [str(override).partition("=") for override in nested(spec, "provenance", "set") or []]
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in overrides)


def nested(table: Any, *keys: str) -> Any:
    """Return the value under nested keys in a table read from TOML or JSON; None if one of the keys is missing."""
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def _file_stamp(directory: RunDirectory) -> FileStamp:
    """Sizes and modification times of the files from which a summary is made. If the stamp is unchanged, so is the
    summary."""
    paths = (directory.events, directory.engine, directory.control, directory.path / "labels.json")
    return tuple(number for path in paths for number in _stat(path))


def short_name(directory: RunDirectory) -> str:
    """The run's name without the time that its directory's name begins with."""
    found = DIRECTORY_NAME.match(directory.name)
    return found[2] if found else directory.name


def _stat(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)
