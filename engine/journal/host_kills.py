"""Whether the kernel killed a run's engine because host memory ran out: a note in the run directory, written while an
engine works, is compared with what the control groups count."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.config.files.cgroups import PROC, memory_limit_bytes, oom_kills
from engine.journal.directory import RunDirectory
from engine.journal.files import remove_drafts, write_atomically


@dataclass(frozen=True)
class Attempt:
    """An engine at work."""

    kills: dict[str, int] = field(default_factory=dict)
    """Processes killed for memory in each control group before it started."""
    budget_bytes: int | None = None
    """Its micro-batch budget; None before the first probe."""
    killed_before: int = 0
    """Attempts in a row that were killed before their first probe, before this one."""


def _note(directory: RunDirectory) -> Path:
    return directory.path / "host_memory.json"


def note_attempt(directory: RunDirectory, attempt: Attempt) -> None:
    """Raises OSError. Removes what an engine left that was killed while it wrote its note."""
    note = _note(directory)
    write_atomically(note, json.dumps(asdict(attempt)))
    remove_drafts(note)


def forget_attempt(directory: RunDirectory) -> None:
    """To be called by an engine that ends and records why."""
    _note(directory).unlink(missing_ok=True)


def killed_attempt(directory: RunDirectory, proc: Path = PROC) -> Attempt | None:
    """The attempt whose engine the kernel killed for memory; None if there is none, or the kernel does not say."""
    try:
        attempt = Attempt(**json.loads(_note(directory).read_text("utf-8")))
        now = oom_kills(proc)
        return attempt if any(now.get(group, 0) > count for group, count in attempt.kills.items()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # no note, or one of another shape


def killed_text(directory: RunDirectory) -> str | None:
    """Words for an engine that was killed for memory, None for any other."""
    if killed_attempt(directory) is None:
        return None
    limit = memory_limit_bytes()
    whose = f"the container's limit of {limit / 2**20:,.0f} MiB" if limit else "the machine's memory"
    return f"was killed by the kernel because host memory ran out ({whose})"
