"""Writes a `heartbeat` event whenever no other event was written for a while.

Readers judge whether an engine lives by the age of the event file, so any event is a sign of life: a run that takes a
step every second writes no heartbeat at all.

Try: `with heartbeats(writer): ...` around anything slow, then read `events.jsonl`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.journal.events import EventWriter

HEARTBEAT_SECONDS = 5.0
"""The longest time between two events while the engine lives. A quiet hour costs 720 lines, about 60 KB."""


@contextmanager
def heartbeats(writer: EventWriter, *, every_seconds: float = HEARTBEAT_SECONDS) -> Iterator[None]:
    """While the block runs, write a heartbeat whenever nothing else was written for `every_seconds`."""
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(writer, over, every_seconds), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _beat(writer: EventWriter, over: threading.Event, every_seconds: float) -> None:
    while not over.wait(every_seconds / 2):
        try:
            writer.write_if_quiet(every_seconds, "heartbeat")
        except OSError:
            # On a full disk this thread goes on: space may be freed, and the engine itself reports the full disk.
            continue
