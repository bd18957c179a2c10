"""What long journals say up to a place, kept in this user's state folder, so that the next process reads on from there.

A journal of 2 GB takes seconds to read. It is only appended to: what was read of it stays true as long as the file
begins as it did, and the bytes before the place are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from engine.config.files.trust import state_folder
from engine.journal.files import open_regular, read_table, write_atomically
from engine.journal.journal_state import JournalState, StageState

FROM_BYTES = 8 << 20
"""Of a journal, or of what was added to it, from which on its reading is kept: less is read in 40 ms."""

COMPARED_BYTES = 64 << 10
"""At the beginning of the file and before the place."""

MOST_JOURNALS, MOST_BYTES = 256, 16 << 20
"""Journals whose readings are kept, and the size of one reading."""


@dataclass
class Reading:
    """What was read of a journal up to `offset`, where a line begins."""

    offset: int
    state: JournalState
    damaged: int
    losses: list[tuple[int, float]]
    stride: int
    lines: int


FIELDS = frozenset(field.name for field in fields(JournalState))


def find_reading(events: Path) -> Reading | None:
    """The kept reading of a journal; None if there is none, or the file is another one by now."""
    path = _place(events)
    try:
        if events.stat().st_size < FROM_BYTES:
            return None
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
        found = read_table(path, finite=False)
        if found["code"] != code_digest() or found["identity"] != _identity(events, int(found["offset"])):
            return None
        losses = [(int(step), float(loss)) for step, loss in found["losses"]]
        numbers = (int(found[key]) for key in ("stride", "lines"))
        return Reading(int(found["offset"]), _state(found["state"]), int(found["damaged"]), losses, *numbers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_reading(events: Path, reading: Reading) -> None:
    """Keep what was read for later processes. Nothing is kept where the state folder cannot be written."""
    path = _place(events)
    with suppress(OSError):
        identity = _identity(events, reading.offset)
        text = json.dumps({"code": code_digest(), "identity": identity, **asdict(reading)})
        if len(text) > MOST_BYTES:
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, text, durable=False, mode=0o600)
        remove_oldest(path.parent, MOST_JOURNALS)


def _place(events: Path) -> Path:
    return state_folder() / "journals" / f"{digest(str(events.absolute()))}.json"


def _identity(events: Path, offset: int) -> list[Any]:
    """Return what is the same as long as the file has the same first `offset` bytes."""
    with open_regular(events) as file:
        found = os.fstat(file.fileno())
        first = file.read(min(offset, COMPARED_BYTES))
        file.seek(max(0, offset - COMPARED_BYTES))
        last = file.read(min(offset, COMPARED_BYTES))
    return [found.st_dev, found.st_ino, offset, hashlib.sha256(first + last).hexdigest()]


def _state(row: dict[str, Any]) -> JournalState:
    """Raises ValueError for other fields."""
    if row.keys() != FIELDS:
        raise ValueError("its fields are not those of a state")
    stages = {name: StageState(**stage) for name, stage in row.pop("stages").items()}
    return JournalState(stages=stages, **row)


@cache
def code_digest() -> str:
    """Identifies the code that makes summaries: another version may say something else of the same files."""
    with os.scandir(Path(__file__).parent) as entries:
        files = sorted((entry.name, entry.stat()) for entry in entries if entry.name.endswith(".py"))
    return digest(*(f"{name} {found.st_size} {found.st_mtime_ns}" for name, found in files))


def digest(*texts: str) -> str:
    """A name for these texts."""
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def remove_oldest(folder: Path, most: int) -> None:
    """Remove the files but the `most` that were written last."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in files[most:]:
        path.unlink(missing_ok=True)
