"""The engine's sign of life while nothing else happens: a `heartbeat` event after every quiet stretch.

A run that steps every second writes no heartbeat at all: any line is a sign of life, and readers judge silence by
the file's age. Only the engine beats.

Try: `with beating(writer): ...` around anything slow, then look at `events.jsonl`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.journal.events import EventWriter

HEARTBEAT_SECONDS = 5.0
"""How long the file may stay silent while the engine lives. A quiet hour costs 720 lines, about 60 KB."""


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
            # A full disk silences the heart but must not end the thread: room may come back, and the
            # engine learns of the disk from its own writes.
            continue
