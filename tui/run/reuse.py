"""Reusing an existing run: says whether it can be resumed, and reads its settings for the Launch screen.

Try: `launch_settings(resolve_run("last", None))`
"""

from __future__ import annotations

from typing import TypedDict

from engine.journal.directory import RunDirectory, read_spec
from engine.journal.event_text import clean

SHIPPED = "shipped:"


def resume_refusal(directory: RunDirectory, status: str) -> str | None:
    """Why a run with this status cannot be resumed, as a message for the footer; None if it can."""
    if status == "running":
        return "the run is already running"
    if status == "done":
        return f"the run is done; to extend it: tunedeck resume {clean(directory.name)} --set train.max_steps=N"
    if status == "queued":
        return "the run was never started; nothing to resume"
    return None if status else "the run has not been read yet"


class LaunchSettings(TypedDict):
    """The settings with which the Launch screen opens."""

    profile: str
    """A name or a path."""
    recipe: str
    """A name or a path."""
    overrides: list[str]
    """KEY=VALUE, as --set takes them."""


def launch_settings(directory: RunDirectory) -> LaunchSettings:
    """The settings of an existing run, from the provenance in its run spec; empty if the provenance cannot be read."""
    spec = read_spec(directory)
    provenance = spec.get("provenance") or {}

    def source(kind: str) -> str:
        file = str(provenance.get(f"{kind}_file") or "")
        if file and not file.startswith(SHIPPED):
            return file
        return file.removeprefix(SHIPPED) or str((spec.get(kind) or {}).get("name") or "")

    overrides = [str(override) for override in provenance.get("set") or []]
    return LaunchSettings(profile=source("profile"), recipe=source("recipe"), overrides=overrides)
