"""Runs that wait for their turn: an ordered list of names beside the runs, changed under a file lock.

A waiting run is an ordinary run directory whose engine has not been started (status "queued").
`engine.launch.queue_worker` starts the runs; the list is the only state, so a killed worker loses nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import FULL_DISK, EnvironmentProblem, UsageError
from engine.journal.directory import HeldFolder, RunDirectory
from engine.journal.files import locked, read_table, remove_drafts, write_atomically
from engine.journal.folder_summaries import FolderSummaries
from engine.journal.liveness import ProcessIdentity, is_alive, parse_identity

ORDER = "order.json"
"""The file with the order of the queue, in its folder."""


@dataclass
class QueueState:
    waiting: list[str] = field(default_factory=list)
    current: str | None = None
    worker: ProcessIdentity | None = None
    limited_to: list[str] | None = None
    """The runs that the worker starts, those of a sweep; None: all."""

    @property
    def left_waiting(self) -> list[str]:
        """Waiting runs that no process will start."""
        if self.worker is None:
            return list(self.waiting)
        return [name for name in self.waiting if self.limited_to is not None and name not in self.limited_to]


class Queue:
    """The queue of one runs folder. Every method is one transaction; between calls only summaries of runs are kept, as
    long as no file of the run changes."""

    def __init__(self, runs_dir: Path | HeldFolder) -> None:
        self._place = runs_dir
        self.summaries = FolderSummaries(self.runs_dir)

    @classmethod
    def held(cls, runs_dir: Path) -> Queue:
        """The queue of a folder that stays open: moved, it is followed; removed, each use raises EnvironmentProblem,
        and no new folder is made at the old place."""
        return cls(HeldFolder(runs_dir, "the runs folder", "start the runs again in a permanent folder"))

    @property
    def runs_dir(self) -> Path:
        """Raises EnvironmentProblem if it is held and was removed."""
        return self._place if isinstance(self._place, Path) else self._place.path

    @property
    def folder(self) -> Path:
        return self.runs_dir / ".queue"

    @property
    def log(self) -> Path:
        """A line for each thing the queue worker did."""
        return self.folder / "worker.log"

    def run(self, name: str) -> RunDirectory:
        return RunDirectory(self.runs_dir / name)

    def read(self) -> QueueState:
        """Without runs that are gone or were started by hand, and without a dead worker; the file is not changed."""
        state = self._load()
        state.waiting = [name for name in state.waiting if self._still_waits(name)]
        if state.worker is not None and not is_alive(state.worker):
            state.worker = None
        return state

    def require_order(self) -> None:
        """Raise EnvironmentProblem if the queue is held and the file with its order is gone, which goes only with its
        folder: while a folder is being removed, the queue in it looks empty."""
        if isinstance(self._place, HeldFolder) and not (self.folder / ORDER).exists():
            raise self._place.removed()

    def add(self, *directories: RunDirectory, first: bool = False) -> QueueState:
        """Put runs at the end, or at the front, in their order. Raises UsageError if one is in another folder or has
        been started already."""
        for directory in directories:
            if directory.path.parent.resolve() != self.runs_dir.resolve():
                raise UsageError(
                    f"{directory.path} is not in {self.runs_dir}", fix="add it to the queue of the folder it is in"
                )
            if not self._still_waits(directory.name):
                raise UsageError(
                    f"run {directory.name} has already been started",
                    fix=f"continue it with: tunedeck resume {directory.name}",
                )
        added = [directory.name for directory in directories]
        with self._transaction() as state:
            others = [name for name in state.waiting if name not in added]
            state.waiting = [*added, *others] if first else [*others, *added]
        return self.read()

    def remove(self, name: str) -> None:
        """Raises UsageError if the run does not wait in this queue."""
        with self._transaction() as state:
            self._require_waiting(state, name)
            state.waiting.remove(name)

    def move(self, name: str, position: int) -> None:
        """Move a waiting run to `position`, counted from 1, at most to the end. Raises UsageError as `remove` does."""
        with self._transaction() as state:
            self._require_waiting(state, name)
            state.waiting.remove(name)
            state.waiting.insert(max(0, position - 1), name)

    def limit_worker(self, names: Sequence[str] | None) -> ProcessIdentity | None:
        """Let the worker start only `names`, or all runs if None; returns the live worker, else None. A live worker is
        never limited further: it starts `names` beside those that it was asked for."""
        with self._transaction() as state:
            alive = state.worker if state.worker is not None and is_alive(state.worker) else None
            if names is None or alive is None:
                state.limited_to = None if names is None else list(names)
            elif state.limited_to is not None:
                state.limited_to += [name for name in names if name not in state.limited_to]
            return alive

    def register_worker(self, worker: ProcessIdentity) -> None:
        """Make `worker` the process that runs the queue. Raises EnvironmentProblem when another one is alive."""
        with self._transaction() as state:
            self._refuse_second_worker(state, worker)
            state.worker = worker

    def _refuse_second_worker(self, state: QueueState, worker: ProcessIdentity) -> None:
        if state.worker is not None and state.worker != worker and is_alive(state.worker):
            raise EnvironmentProblem(
                f"the queue is already running: process {state.worker.pid} on {state.worker.host}",
                fix="see its runs: tunedeck queue list",
            )

    def take_next(self, worker: ProcessIdentity) -> RunDirectory | None:
        """Make the first waiting run that the worker may start the current one, and `worker` the process that runs the
        queue; None, and no worker, if there is none. Raises EnvironmentProblem when another worker is alive."""
        with self._transaction() as state:
            self._refuse_second_worker(state, worker)
            state.waiting = [name for name in state.waiting if self._still_waits(name)]
            limit = state.waiting if state.limited_to is None else state.limited_to
            state.current = next((name for name in state.waiting if name in limit), None)
            if state.current is None:
                state.worker = state.limited_to = None
                return None
            state.waiting.remove(state.current)
            state.worker = worker
            return self.run(state.current)

    def was_left_by(self, pid: int) -> bool:
        """Whether a worker that is gone did not take itself off the queue, as one that was stopped or is done does."""
        worker = self._load().worker
        return worker is not None and worker.pid == pid

    def clear_worker(self) -> None:
        """Waiting runs stay in the queue."""
        with self._transaction() as state:
            state.worker = state.limited_to = None

    def _still_waits(self, name: str) -> bool:
        directory = self.run(name)
        return directory.exists() and self.summaries.of(directory).status == "queued"

    def _require_waiting(self, state: QueueState, name: str) -> None:
        if name not in state.waiting:
            raise UsageError(
                f"run {name} is not waiting in the queue of {self.runs_dir}",
                expected=", ".join(state.waiting) or "a waiting run; the queue is empty",
                fix="tunedeck queue list",
            )

    def _load(self) -> QueueState:
        path = self.folder / ORDER
        try:
            return _parse(read_table(path))
        except FileNotFoundError:
            return QueueState()
        except OSError as error:
            reason = error.strerror or error
            raise EnvironmentProblem(f"{path} cannot be read: {reason}", fix="check its permissions") from error
        except ValueError as error:
            raise EnvironmentProblem(f"{path} cannot be read: {error}", fix="remove it; the runs are kept") from error

    @contextmanager
    def _transaction(self) -> Iterator[QueueState]:
        """Lock the queue and yield its state; changes are written if the block ends without an exception."""
        lock = ExitStack()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked(self.folder / "lock"))
        except OSError as error:
            raise self._not_written(error) from error
        with lock:
            state = self._load()
            yield state
            self._store(state)

    def _store(self, state: QueueState) -> None:
        worker = None if state.worker is None else asdict(state.worker)
        content = {
            "waiting": state.waiting, "current": state.current, "worker": worker, "limited_to": state.limited_to
        }  # fmt: skip
        try:
            write_atomically(self.folder / ORDER, json.dumps(content, indent=2) + "\n")
            remove_drafts(self.folder / ORDER)
        except OSError as error:
            raise self._not_written(error) from error

    def _not_written(self, error: OSError) -> EnvironmentProblem:
        first = "free space on its disk" if error.errno in FULL_DISK else "get write permission there"
        return EnvironmentProblem(
            f"the queue in {self.folder} cannot be written: {error.strerror or error}",
            fix=f"{first}, or choose another runs folder with --runs DIR",
        )


def _parse(found: dict[str, Any]) -> QueueState:
    """Raises ValueError for tables of another shape, and for names that are no folders of the runs folder."""
    match found:
        case {"waiting": list(waiting), "current": current, "worker": worker}:
            limit = found.get("limited_to")
            if not (limit is None or isinstance(limit, list)):
                raise ValueError("its limited_to is not a list")
            names = [*waiting, *([] if current is None else [current]), *(limit or [])]
            if all(isinstance(name, str) and _is_folder_name(name) for name in names):
                return QueueState(waiting, current, None if worker is None else parse_identity(worker), limit)
    raise ValueError("it does not have the structure of a queue")


MOST_NAME_BYTES = 255
"""Of a folder's name, on all common file systems; a longer one cannot even be looked for."""


def _is_folder_name(name: str) -> bool:
    return 0 < len(os.fsencode(name)) <= MOST_NAME_BYTES and Path(name).name == name != ".." and "\0" not in name
