"""Whether a run can be gone on with from here, and if not, why: the same answer on every screen."""

from __future__ import annotations

from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean


def why_not_resume(directory: RunDirectory, status: str) -> str | None:
    """A sentence for the footer; None when it can."""
    if status == "running":
        return "it runs already"
    if status == "done":
        return f"it is done; to make it longer: tunedeck resume {clean(directory.name)} --set train.max_steps=N"
    if status == "queued":
        return "it was never started: there is nothing to resume"
    return None if status else "the run is not read yet"
