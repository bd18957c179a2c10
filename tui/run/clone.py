"""What the Launch screen is opened with to do a run again: profile, recipe and overrides, as they were given.

Try: `recipe_of(resolve_run("last", None))`
"""

from __future__ import annotations

from typing import TypedDict

from engine.journal.directory import RunDirectory
from engine.journal.summary import read_spec

SHIPPED = "shipped:"


class LaunchSettings(TypedDict):
    """The argument of the Launch screen."""

    profile: str
    """A name or a path."""
    recipe: str
    overrides: list[str]
    """`K=V`, as `--set` takes them."""


def recipe_of(directory: RunDirectory) -> LaunchSettings:
    """The settings of a run, from its `run.toml`; empty where that cannot be read."""
    spec = read_spec(directory)
    origin = spec.get("provenance") or {}

    def source(kind: str) -> str:
        file = str(origin.get(f"{kind}_file") or "")
        if file and not file.startswith(SHIPPED):
            return file
        return file.removeprefix(SHIPPED) or str((spec.get(kind) or {}).get("name") or "")

    return LaunchSettings(
        profile=source("profile"), recipe=source("recipe"), overrides=[str(one) for one in origin.get("set") or []]
    )
