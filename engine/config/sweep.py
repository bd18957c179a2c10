"""Sweeps: a recipe's [sweep] becomes one run spec for each combination of its values (a grid search)."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime
from typing import Any

from engine.config.load import override
from engine.config.schema.run import RunSpec, SweepPoint
from engine.errors import UsageError

MOST_POINTS = 64
"""Points of a sweep that are created without --force; a larger number is usually a typing error."""


def sweep_points(spec: RunSpec, *, force: bool = False) -> list[RunSpec]:
    """Return the run spec of every point of a sweep (a combination of its values), in the order of the file; the last
    key varies fastest. What is "auto" in [parallel] is not decided yet.

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
    import tomlkit  # slow to import: not before the console's first screen

    alone = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"sweep": {}})})
    overrides = [f"{key}={tomlkit.item(value).as_string()}" for key, value in point.items()]
    found = override(alone, overrides, name=spec.name).spec
    provenance = found.provenance.model_copy(update={"sweep": SweepPoint(id=sweep_id, point=point)})
    return found.model_copy(update={"name": point_name(spec.name, point), "provenance": provenance})


def point_name(name: str, point: dict[str, Any]) -> str:
    """Return the name of a point's run, such as demo-learning_rate=0.0001-seed=2: `name`, then the last part of each
    key of `point` with its value, in at most 120 characters. Every character other than A-Z, a-z, 0-9 and . _ = -
    becomes "_"."""
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in point.items()]
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", "-".join([name, *parts]))[:120].rstrip("_")


def refuse_sweep(spec: RunSpec) -> None:
    """Raise UsageError for a recipe with a sweep, where a single run is created."""
    if spec.recipe.sweep:
        raise UsageError(
            f"recipe {spec.recipe.name!r} has a [sweep], which is several runs",
            expected="a single run, or a command that starts all runs",
            fix="tunedeck train or tunedeck queue add; --set sweep= removes the sweep",
        )
