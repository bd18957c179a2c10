"""Summaries of the runs of one folder: a journal is read again only when a file of its run has changed.

A folder may hold hundreds of ended runs, each with thousands of lines. Their summaries are kept in this user's state
folder, beside the sizes and times of the files that they were made from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from engine.config.files.trust import state_folder
from engine.errors import UsageError
from engine.journal.directory import RunDirectory
from engine.journal.files import open_regular, read_table, write_atomically
from engine.journal.kept_reading import code_digest, digest, remove_oldest
from engine.journal.liveness import is_claimed
from engine.journal.score_groups import BestEvaluation
from engine.journal.summary import RunSummary, summarise

FileStamp = tuple[int, ...]

LOOKED_AT = ("", "events.jsonl", "engine.json", "run.toml", "control", "checkpoints")
"""What changes when the summary or the labels of a run do: the folder itself when a file is replaced in it."""

MOST_FOLDERS = 64
"""Runs folders whose summaries are kept; those that were written longest ago go first."""

FIELDS = frozenset(field.name for field in fields(RunSummary))


def file_stamp(directory: RunDirectory) -> FileStamp:
    """Sizes, times and inodes. Of a run without a process, summary and labels are the same as long as the stamp is."""
    stamp: list[int] = []
    folder = str(directory.path)
    for name in LOOKED_AT:  # joined as texts: hundreds of runs are looked at every second
        try:
            found = os.stat(f"{folder}/{name}")
        except OSError:
            stamp += (0, 0, 0)
        else:
            stamp += (found.st_size, found.st_mtime_ns, found.st_ino)
    return tuple(stamp)


class FolderSummaries:
    """The summaries of one runs folder. What cannot be read or written in the state folder is computed again."""

    def __init__(self, runs_dir: Path) -> None:
        self._file = state_folder() / "summaries" / f"{digest(str(runs_dir.absolute()))}.json"
        self._kept: dict[str, tuple[FileStamp, RunSummary]] | None = None
        self._is_written = True

    def of(self, directory: RunDirectory) -> RunSummary:
        """The kept summary if it still holds, else a new one."""
        known = self.known(directory)
        if known is not None:
            return known
        stamp = file_stamp(directory)
        summary = summarise(directory)
        self.take(directory, stamp, summary)
        return summary

    def known(self, directory: RunDirectory) -> RunSummary | None:
        """None if there is no summary of the run as it is now."""
        if self._kept is None:
            self._kept = _read(self._file)
        stamp, summary = self._kept.get(str(directory.path), ((), None))
        if summary is None or stamp != file_stamp(directory):
            return None
        # Another machine may have begun to work on it; its lock tells before a file does.
        return None if summary.status == "stale" and is_claimed(directory) else summary

    def take(self, directory: RunDirectory, stamp: FileStamp, summary: RunSummary) -> None:
        """Add a summary that was made after `stamp`. That of a running engine is not kept: it ends without changing a
        file."""
        if summary.status == "running":
            return
        if self._kept is None:
            self._kept = _read(self._file)
        self._kept[str(directory.path)] = (stamp, summary)
        self._is_written = False

    def write(self, runs: Iterable[RunDirectory]) -> None:
        """Keep the summaries of these runs for later processes."""
        if self._is_written or self._kept is None:
            return
        paths = [path for run in runs if (path := str(run.path)) in self._kept]
        rows = {path: {"stamp": self._kept[path][0], "summary": asdict(self._kept[path][1])} for path in paths}
        self._is_written = True
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._file, json.dumps({"code": code_digest(), "runs": rows}), durable=False, mode=0o600)
            remove_oldest(self._file.parent, MOST_FOLDERS)


def runs_of_sweep(sweep_id: str, runs: Collection[RunDirectory], summaries: FolderSummaries) -> list[RunDirectory]:
    """Those of `runs` that belong to the sweep. Raises UsageError if there is none."""
    found = [run for run in runs if sweep_id and summaries.of(run).sweep == sweep_id]
    if not found:
        raise UsageError(
            f"no runs belong to sweep {sweep_id!r}",
            expected="sweep:ID as printed at the start of the sweep",
            fix="tunedeck runs",
        )
    return found


def _read(file_path: Path) -> dict[str, tuple[FileStamp, RunSummary]]:
    """Empty for a file of another version or another user, and for a damaged one."""
    try:
        with open_regular(file_path) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return {}
        found = read_table(file_path, finite=False)
        if found.get("code") != code_digest():
            return {}
        return {path: (tuple(row["stamp"]), _summary(row["summary"])) for path, row in found["runs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _summary(row: dict[str, Any]) -> RunSummary:
    """Raises ValueError for other fields."""
    if row.keys() != FIELDS:
        raise ValueError("its fields are not those of a summary")
    best = row.pop("best")
    return RunSummary(**row, best=None if best is None else BestEvaluation(*best))
