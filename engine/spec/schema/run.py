"""The schema of a run spec: the resolved profile, recipe and overrides, which is all that the engine process gets.

Written as `run.toml` into the run directory; `tunedeck train --run-spec run.toml` repeats the run.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from engine.spec.schema.base import Table
from engine.spec.schema.profile import Profile
from engine.spec.schema.recipe import Recipe


class SweepPoint(Table):
    """The sweep that a run belongs to."""

    id: str
    """Name of the sweep, the same in all its runs."""
    point: dict[str, Any]
    """Swept key = its value in this run."""


class Provenance(Table):
    """The files and overrides that a run spec was made from."""

    profile_file: str = ""
    """Path of the profile file, or "shipped:NAME"."""
    profile_sha256: str = ""
    """SHA-256 of the profile file."""
    recipe_file: str = ""
    """Path of the recipe file, or "shipped:NAME"."""
    recipe_sha256: str = ""
    """SHA-256 of the recipe file."""
    set_: list[str] = Field(default=[], alias="set")
    """The overrides, as typed after --set."""
    versions: dict[str, str] = {}
    """Package name = version, of packages that can change the numbers of a run."""
    parallel: str = ""
    """Which keys of the profile's [parallel] the recipe replaced, each with the profile's own value; and what was
    decided where a key is "auto"."""
    sweep: SweepPoint | None = None
    """The sweep that the run is a point of."""


class Limits(Table):
    """Command-line options that are stored with the run and apply again when it is resumed."""

    max_hours: float | None = None
    """Checkpoint and stop after this many hours."""
    wait_seconds: float | None = None
    """Wait up to this many seconds for a busy device before giving up."""
    on_finish: str | None = None
    """Shell command run when the run ends, with TUNEDECK_RUN and TUNEDECK_STATUS set."""
    devices: list[int] = []
    """Indices of the devices to use; empty: the first ones."""
    as_written: bool = False
    """Start with the recipe's own micro-batch and memory settings even if the plan says that they do not fit."""
    trust_remote_code: bool = False
    """Allow model code from the hub; only ever set by the user's own command line."""


class RunSpec(Table):
    """Everything that defines one run. All paths are absolute."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    """Version of this file format."""
    kind: Literal["run"] = "run"
    """Always "run"."""
    name: str
    """The run's --name, else the recipe's."""
    profile: Profile
    recipe: Recipe
    provenance: Provenance = Provenance()
    limits: Limits = Limits()
