"""Expands a recipe's [sweep] into ordinary runs and creates them. Each combination of the sweep's values is a point and
gets one run.

The points are planned before any run is created. Each run stores the id of its sweep (`provenance.sweep` in run.toml),
by which `tunedeck compare sweep:ID` finds it.

Try: `tunedeck queue add -p demo -r demo --set 'sweep."train.seed"=[1, 2]'`
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomlkit

from engine.budget.advise.strategy import settle_parallel
from engine.errors import DoesNotFitError, UsageError
from engine.journal.directory import RunDirectory
from engine.journal.summary import read_spec
from engine.launch.create_run import checked_plan, create_run
from engine.launch.require_hub import require_hub
from engine.spec.load import override
from engine.spec.schema.run import RunSpec, SweepPoint

MOST_POINTS = 64
"""Points of a sweep that are created without --force; a larger number is usually a typing error."""


def sweep_points(spec: RunSpec, *, force: bool = False) -> list[RunSpec]:
    """Return the run spec of every point of a sweep (a combination of its values), in the order of the file; the last
    key varies fastest.

    Raises UsageError for more than MOST_POINTS points unless `force`, and SpecError for a point that is not valid.
    """
    sweep = spec.recipe.sweep
    points = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
    if len(points) > MOST_POINTS and not force:
        raise UsageError(
            f"the sweep has {len(points)} points", expected=f"at most {MOST_POINTS}", fix="--force starts all of them"
        )
    sweep_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{spec.name}"
    return [_point_spec(spec, sweep_id, point) for point in points]


def _point_spec(spec: RunSpec, sweep_id: str, point: dict[str, Any]) -> RunSpec:
    alone = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"sweep": {}})})
    overrides = [f"{key}={tomlkit.item(value).as_string()}" for key, value in point.items()]
    found = override(alone, overrides, name=spec.name).spec
    provenance = found.provenance.model_copy(update={"sweep": SweepPoint(id=sweep_id, point=point)})
    named = found.model_copy(update={"name": point_name(spec.name, point), "provenance": provenance})
    return settle_parallel(named).spec


def point_name(name: str, point: dict[str, Any]) -> str:
    """Return the name of a point's run, such as demo-learning_rate=0.0001-seed=2: `name`, then the last part of each
    key of `point` with its value, in at most 120 characters. Every character other than A-Z, a-z, 0-9 and . _ = -
    becomes "_"."""
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in point.items()]
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", "-".join([name, *parts]))[:120].rstrip("_")


def create_sweep(spec: RunSpec, folder: Path, *, force: bool = False) -> tuple[list[RunDirectory], list[str]]:
    """Plan all points, then create a run for each; returns the runs and notices for the user.

    Raises DoesNotFitError with every point that does not fit (with `force` those points are left out instead), and the
    errors of `create_run`.
    """
    specs = sweep_points(spec, force=force)
    too_large = list(_too_large(specs, folder))
    if too_large and not force:
        names = "\n  ".join(point.name for point in too_large)
        raise DoesNotFitError(
            f"{len(too_large)} of {len(specs)} points of the sweep do not fit:\n  {names}",
            fix="--force starts the others; see one with: tunedeck plan and its values in --set",
        )
    fitting = [point for point in specs if point not in too_large]
    require_hub(fitting)
    runs, notices = [], []
    for point in fitting:
        directory, found = create_run(point, folder, queued=True, hub_checked=True)
        runs.append(directory)
        notices += found
    return runs, list(dict.fromkeys(notices))


def _too_large(specs: list[RunSpec], folder: Path) -> Iterator[RunSpec]:
    for point in specs:
        try:
            checked_plan(point, folder, force=False)
        except DoesNotFitError:
            yield point


def runs_of_sweep(sweep_id: str, runs: list[RunDirectory]) -> list[RunDirectory]:
    """Return those of `runs` that belong to the sweep `sweep_id`, in the order of their points. Raises UsageError if
    there is none."""
    found = [run for run in runs if sweep_id and _sweep_of(run) == sweep_id]
    if not found:
        raise UsageError(
            f"no runs of a sweep {sweep_id!r}",
            expected="sweep:ID as the start of the sweep printed it",
            fix="tunedeck runs",
        )
    return found


def _sweep_of(run: RunDirectory) -> str:
    sweep = read_spec(run).get("provenance", {}).get("sweep", {})
    return str(sweep.get("id", "")) if isinstance(sweep, dict) else ""
