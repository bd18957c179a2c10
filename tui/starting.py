"""Starting a run, or putting it into the queue: the same steps as `tunedeck train --detach` and `tunedeck queue add`.

The engine is a process of its own session; the console keeps nothing of it but a thread that takes note of its end, so
that it does not stay behind as a zombie while the console is open.

Try: `python -m pytest tests/tui/test_launch_start.py`
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

from engine.creation import new_run
from engine.journal.directory import RunDirectory
from engine.journal.queue import Queue
from engine.spec.run import RunSpec
from engine.start import start_engine

QUEUE_WAIT_SECONDS = 24 * 3600.0
"""How long a queued run waits for a busy device; as `tunedeck queue add` has it."""


class Started(NamedTuple):
    """A run that was made, what to tell the user, and what else they should know."""

    directory: RunDirectory
    said: str
    notices: list[str]


def start_run(spec: RunSpec, runs_dir: Path, *, force: bool = False) -> Started:
    """Make the run's directory and start an engine on it. Raises TunedeckError."""
    directory, notices = new_run(spec, runs_dir, force=force)
    process = start_engine(directory)
    threading.Thread(target=process.wait, name=f"reap {process.pid}", daemon=True).start()
    return Started(directory, f"started {directory.name}", notices)


def enqueue_run(spec: RunSpec, runs_dir: Path, *, force: bool = False) -> Started:
    """Make the run's directory and put it at the end of the queue. Raises TunedeckError."""
    limits = spec.limits.model_copy(update={"wait_seconds": QUEUE_WAIT_SECONDS})
    directory, notices = new_run(spec.model_copy(update={"limits": limits}), runs_dir, force=force)
    order = Queue(runs_dir).add(directory)
    place = order.waiting.index(directory.name) + 1
    return Started(directory, f"{directory.name} is number {place} in the queue", notices)
