"""Runs that wait for their turn: an ordered list beside the runs, changed under a lock by whoever comes.

A waiting run is an ordinary run directory whose engine has not been started (status "queued"); the queue holds only its
name. `engine.launch.queue_worker` takes one after another. The list is the only state, so a killed keeper loses
nothing.

Try: `tunedeck queue add -p demo -r demo`, then `cat runs/.queue/order.json`
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.errors import EnvironmentProblem, UsageError
from engine.journal.directory import RunDirectory
from engine.journal.files import write_atomically
from engine.journal.liveness import ProcessIdentity, is_alive
from engine.journal.summary import summarise


@dataclass
class QueueState:
    """What is on disk: names of runs, first to go first, and the one whose turn it is."""

    waiting: list[str] = field(default_factory=list)
    current: str | None = None
    keeper: ProcessIdentity | None = None
    """The process that takes runs from the queue; None when nobody does."""


class Queue:
    """The queue of one runs folder. Every method is one transaction; nothing is kept in memory between two."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir
        self.folder = runs_dir / ".queue"

    @property
    def log(self) -> Path:
        """What the keeper did, a line each."""
        return self.folder / "keeper.log"

    def look(self) -> QueueState:
        """The queue as it is, without runs that are gone or were started by hand, and without a dead keeper."""
        order = self._read()
        order.waiting = [name for name in order.waiting if self._still_waits(name)]
        if order.keeper is not None and not is_alive(order.keeper):
            order.keeper = None
        return order

    def add(self, directory: RunDirectory, *, first: bool = False) -> QueueState:
        """Put a run at the end, or at the front; returns the queue with it.

        Raises UsageError for a run of another folder, or one that has been started already.
        """
        if directory.path.parent.resolve() != self.runs_dir.resolve():
            raise UsageError(f"{directory.path} is not in {self.runs_dir}", fix="add it to the queue of its own folder")
        if not self._still_waits(directory.name):
            raise UsageError(
                f"run {directory.name} has been started already",
                fix=f"tunedeck resume {directory.name} goes on with it",
            )
        with self._changing() as order:
            others = [name for name in order.waiting if name != directory.name]
            order.waiting = [directory.name, *others] if first else [*others, directory.name]
        return self.look()

    def remove(self, name: str) -> None:
        """Take a run out. Raises UsageError when it does not wait here."""
        with self._changing() as order:
            self._expect(order, name)
            order.waiting.remove(name)

    def move(self, name: str, position: int) -> None:
        """Put a waiting run at `position`, counted from 1; beyond the end is the end.

        Raises UsageError when it does not wait here.
        """
        with self._changing() as order:
            self._expect(order, name)
            order.waiting.remove(name)
            order.waiting.insert(max(0, position - 1), name)

    def take(self, keeper: ProcessIdentity) -> RunDirectory | None:
        """The keeper's next run, now current. None, and no keeper any more, when nothing waits.

        Raises EnvironmentProblem when another keeper is at work.
        """
        with self._changing() as order:
            if order.keeper is not None and order.keeper != keeper and is_alive(order.keeper):
                raise EnvironmentProblem(
                    f"process {order.keeper.pid} on {order.keeper.host} already works on this queue",
                    fix="tunedeck queue list",
                )
            order.waiting = [name for name in order.waiting if self._still_waits(name)]
            order.current = order.waiting.pop(0) if order.waiting else None
            order.keeper = keeper if order.current else None
            return RunDirectory(self.runs_dir / order.current) if order.current else None

    def dismiss(self) -> None:
        """Nobody keeps the queue any more; what waits stays."""
        with self._changing() as order:
            order.keeper = None

    def _still_waits(self, name: str) -> bool:
        directory = RunDirectory(self.runs_dir / name)
        return directory.exists() and summarise(directory).status == "queued"

    def _expect(self, order: QueueState, name: str) -> None:
        if name not in order.waiting:
            raise UsageError(
                f"run {name} does not wait in the queue of {self.runs_dir}",
                expected=", ".join(order.waiting) or "a run; the queue is empty",
                fix="tunedeck queue list",
            )

    def _read(self) -> QueueState:
        path = self.folder / "order.json"
        try:
            found = json.loads(path.read_text("utf-8"))
            keeper = found["keeper"]
            return QueueState(
                [str(name) for name in found["waiting"]],
                found["current"],
                None if keeper is None else ProcessIdentity(keeper["pid"], keeper["started"], keeper["host"]),
            )
        except FileNotFoundError:
            return QueueState()
        except OSError as error:
            reason = error.strerror or error
            raise EnvironmentProblem(f"{path} cannot be read: {reason}", fix="check its permissions") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EnvironmentProblem(f"{path} cannot be read: {error}", fix="remove it; the runs stay") from error

    @contextmanager
    def _changing(self) -> Iterator[QueueState]:
        """The order, written back when the block ends well; nobody else changes it meanwhile."""
        with self._locked() as order:
            yield order
            try:
                write_atomically(self.folder / "order.json", json.dumps(asdict(order), indent=2) + "\n")
            except OSError as error:
                raise self._not_written(error) from error

    @contextmanager
    def _locked(self) -> Iterator[QueueState]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._not_written(error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield self._read()
        finally:
            os.close(file)

    def _not_written(self, error: OSError) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"the queue in {self.folder} cannot be written: {error.strerror or error}",
            fix="make room on its disk, or choose another runs folder with --runs DIR",
        )
