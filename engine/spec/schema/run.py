"""The run spec: the resolved result of profile, recipe and overrides, which is all the engine process is given.

Written as `run.toml` into the run directory; `tunedeck train --run-spec run.toml` repeats the run.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.spec.schema.base import Table
from engine.spec.schema.profile import Profile
from engine.spec.schema.recipe import Recipe


class Provenance(Table):
    """Where a run spec came from."""

    profile_file: str = ""
    """Path of the profile file, or "shipped:NAME"."""
    profile_sha256: str = ""
    """Hash of its bytes."""
    recipe_file: str = ""
    """Path of the recipe file, or "shipped:NAME"."""
    recipe_sha256: str = ""
    """Hash of its bytes."""
    set_: list[str] = Field(default=[], alias="set")
    """The --set overrides, as typed."""
    versions: dict[str, str] = {}
    """Package name = version, of everything that touches the numbers."""


class Limits(Table):
    """What the command line adds to a run."""

    max_hours: float | None = None
    """Checkpoint and stop after this many hours."""
    wait_seconds: float | None = None
    """Wait up to this many seconds for a busy device before giving up."""
    on_finish: str | None = None
    """Shell command run when the run ends, with TUNEDECK_RUN and TUNEDECK_STATUS set."""
    devices: list[int] = []
    """Indices of the devices to use; empty means the first ones."""
    trust_remote_code: bool = False
    """Allow model code from the hub; only ever set by the user's own command line."""


class RunSpec(Table):
    """Everything one run is made of. All paths in it are absolute."""

    schema_: Literal[1] = Field(1, alias="schema")
    """Version of this file format."""
    kind: Literal["run"] = "run"
    """Always "run"."""
    name: str
    """The run's --name, else the recipe's."""
    profile: Profile
    recipe: Recipe
    provenance: Provenance = Provenance()
    limits: Limits = Limits()
