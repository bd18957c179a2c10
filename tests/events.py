"""Reading a run's events in tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.journal.events import Event, EventTail


def read_events(path: Path) -> Iterator[Event]:
    """Every event of a file, in order; a torn last line and damaged lines are left out."""
    yield from EventTail(path).poll()
