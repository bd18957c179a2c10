"""Measured step times beside the model of time: the pace of a run, kept for later predictions on this machine."""

from __future__ import annotations

from statistics import median
from typing import Any

from engine.budget.architecture.facts import Architecture, from_config
from engine.budget.predict.pace import pace_of, record_pace
from engine.budget.predict.prediction import Predictor
from engine.budget.predict.step_time import StepTime
from engine.config.schema.run import RunSpec
from engine.errors import UnknownArchitectureError
from engine.journal.events import Journal
from engine.model.config import model_config_dict
from engine.train.step.context import StepContext
from engine.train.step.ladder import effective_spec
from engine.train.step.transaction import StepOutcome

FIRST_STEPS = 2
"""Steps that load kernels and fill caches; they do not count."""
LEAST_STEPS = 5
"""Steps below which a run tells nothing about the pace."""
STEPS = 50
"""Steps after which the pace does not change any more."""


class RunPace:
    """Compares the duration of steps with their predictions. Each rank has its own; rank 0's is kept."""

    def __init__(self, spec: RunSpec, context: StepContext) -> None:
        self._spec, self._context = spec, context
        self._before = pace_of(spec)
        self._times: dict[int, StepTime] = {}
        """By the number of layers that recompute."""
        self._arch = _architecture(spec)
        self._seen = 0
        self._factors: list[float] = []
        self._seconds: list[float] = []

    def note(self, outcome: StepOutcome, seconds: float, *, clean: bool) -> None:
        """After a step that took so many seconds; `clean`: nothing in it was repeated."""
        self._seen += 1
        counts = clean and outcome.ran and self._seen > FIRST_STEPS and len(self._factors) < STEPS
        if not counts or self._arch is None:
            return
        layers = self._context.loaded.checkpointing
        if layers not in self._times:
            self._times[layers] = StepTime.of(Predictor(self._arch, effective_spec(self._spec, self._context)))
        time, taken = self._times[layers], seconds - outcome.data_wait_seconds
        predicted = time.update + sum(sum(time.micro_batch(ran.rows, ran.length, layers)) for ran in outcome.ran)
        self._factors.append(taken / predicted)
        self._seconds.append(taken)

    def measured(self) -> dict[str, Any]:
        """Median seconds of a step, and what was predicted for the same steps before the run; empty if too few steps
        were taken, without the prediction if none was possible."""
        if len(self._factors) < LEAST_STEPS:
            return {}
        found = {"step_seconds": round(median(self._seconds), 4)}
        if self._before is None:
            return found
        ratios = zip(self._seconds, self._factors, strict=True)
        predicted = median([self._before.factor * seconds / factor for seconds, factor in ratios])
        return found | {"predicted_step_seconds": round(predicted, 4)}

    def keep(self, journal: Journal) -> None:
        """Record the pace for later predictions; warns if it cannot be written."""
        if len(self._factors) < LEAST_STEPS:
            return
        try:
            record_pace(self._spec, median(self._factors))
        except OSError as error:
            journal.warn("not_calibrated", f"how long this run's steps took could not be kept: {error}")


def _architecture(spec: RunSpec) -> Architecture | None:
    try:
        return from_config(model_config_dict(spec))
    except UnknownArchitectureError:
        return None
