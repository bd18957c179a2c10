"""The predicted duration of a planned run: seconds of a step, tokens per second, hours and cost, and their basis."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.budget.predict.pace import pace_of
from engine.budget.predict.prediction import Predictor
from engine.budget.predict.step_time import StepTime
from engine.config.schema.run import RunSpec


@dataclass(frozen=True)
class PlanTime:
    """With every sequence as long as the plan's, without evaluations and checkpoints."""

    step_seconds: float
    tokens_per_second: float
    """Of all devices, padding included."""
    hours: float | None
    """Of all steps; None if train.max_steps is not set."""
    cost: float | None
    """Of `hours`, at the profile's device.price_per_hour; None without either."""
    parts: dict[str, float]
    """Seconds of a step by what they are spent on."""
    basis: Literal["profile", "same_model", "other_models"]
    """The datasheet's figures alone, or corrected by earlier runs on this machine, of this model or of others."""
    factor: float
    """By which the correction multiplies; 1 without one."""
    spread: float
    """By which earlier runs differed from the correction at most, as a share."""
    runs: int
    """Earlier runs that the correction is from."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_time(predictor: Predictor, spec: RunSpec, rows: int, length: int, layers: int) -> PlanTime | None:
    """The duration of a run with micro-batches of `rows` sequences of `length` tokens, in which so many layers
    recompute. None where nothing is known of the device's speed; what several devices exchange is known from earlier
    runs alone."""
    time, pace = StepTime.of(predictor), pace_of(spec)
    if pace is None and (not time.speed.stated or predictor.layout.ranks > 1):
        return None
    factor = pace.factor if pace else 1.0
    parts = {name: factor * seconds for name, seconds in time.parts(rows, length, layers)._asdict().items()}
    seconds, train, device = sum(parts.values()), spec.recipe.train, spec.profile.device
    hours = train.max_steps * seconds / 3600 if train.max_steps else None
    price = device.price_per_hour
    devices = device.count * spec.profile.nodes.count
    return PlanTime(
        step_seconds=seconds,
        tokens_per_second=train.batch_size * length / seconds,
        hours=hours,
        cost=hours * price * devices if hours is not None and price is not None else None,
        parts=parts,
        basis="profile" if pace is None else "same_model" if pace.same_model else "other_models",
        factor=factor,
        spread=pace.spread if pace else 0.0,
        runs=pace.runs if pace else 0,
    )
