"""Run directories as `train` creates them, with their engine not started."""

from __future__ import annotations

from pathlib import Path

from engine.journal.directory import RunDirectory, create_run_directory

RUN_TOML = """schema = 1
kind = "run"
name = "{name}"

[profile]
name = "demo"
[profile.device]
kind = "metered"

[recipe]
name = "demo"
[recipe.model]
id = "builtin:tiny"
"""


def new_run(folder: Path, name: str = "demo") -> RunDirectory:
    """A run directory as `train` makes it, but not started."""
    plan = {"verdict": "fits_smaller", "peak_bytes": 300 << 20, "capacity_bytes": 256 << 20}
    return create_run_directory(folder, name, RUN_TOML.format(name=name), plan)
