"""Computes the verdict and peak of `plan --exact` by simulating an optimizer step.

"Closed form" means the budget's usual prediction, which `plan` shows without --exact. The closed form also chooses the
micro-batch to simulate; if it does not know the architecture, a kept simulation does, and without one "auto" means one
sequence.

Try: `tunedeck plan -p 80gb -r lora --exact`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.budget.advise.levers import with_changes
from engine.budget.advise.plan import make_plan, remedies
from engine.budget.predict.non_torch_memory import non_torch_memory
from engine.budget.predict.prediction import in_whole_samples
from engine.config.files.caches import SequenceBounds, known_bounds
from engine.config.schema.run import RunSpec
from engine.errors import NotSimulatedError, UnknownArchitectureError
from engine.simulate.step import Simulation, simulate_step


@dataclass(frozen=True)
class ExactPlan:
    """The result of `plan --exact`."""

    verdict: str
    capacity_bytes: int
    simulation: Simulation
    beside: dict[str, int]
    """Predicted device bytes outside of torch's tensors (CUDA context, libraries), by component; they cannot be
    simulated."""
    micro_batch: int
    accumulation: int
    length: int
    closed_form: dict[str, dict[str, int]] | None
    """The closed form's bytes by phase and component for the same micro-batch; None for an unknown architecture."""

    @property
    def closed_form_bytes(self) -> int | None:
        """Peak bytes that the closed form predicts; None if it does not know the architecture."""
        return max(sum(row.values()) for row in self.closed_form.values()) if self.closed_form else None

    @property
    def device_bytes(self) -> int:
        """Bytes that the driver would show as used at the peak."""
        return self.simulation.peak_bytes + sum(self.beside.values())

    @property
    def margin_bytes(self) -> int:
        """Capacity minus `device_bytes`; negative if the step does not fit."""
        return self.capacity_bytes - self.device_bytes

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a JSON-compatible dict, with the same keys as `plan --json`."""
        return {
            "verdict": self.verdict,
            "capacity_bytes": self.capacity_bytes,
            "peak_bytes": self.simulation.peak_bytes,
            "device_bytes": self.device_bytes,
            "margin_bytes": self.margin_bytes,
            "deciding_phase": self.simulation.deciding_phase,
            "components": {**self.simulation.components, **self.beside},
            "phases": self.simulation.phases,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "tokens_per_micro_batch": self.micro_batch * self.length,
            "closed_form_bytes": self.closed_form_bytes,
            "closed_form_phases": self.closed_form,
            "exact": True,
        }


def exact_plan(spec: RunSpec) -> ExactPlan:
    """Plan by simulating a step with the micro-batch that the closed form chooses.

    Raises:
        UsageError: the step cannot be simulated (see `simulate_step`).
    """
    batch, asked = spec.recipe.sequences_per_step, spec.recipe.train.micro_batch
    known, closed_form = known_bounds(spec.recipe) or SequenceBounds(spec.recipe.data.max_length), None
    try:
        plan = make_plan(spec)
        rows = plan.micro_batch
        if spec.recipe.train.gradient_checkpointing == "auto" and plan.predictor == "closed_form":
            spec = with_changes(spec, {"train.gradient_checkpointing": plan.recomputed_layers or False})
        closed_form = plan.prediction.phases if plan.predictor == "closed_form" else None
    except (UnknownArchitectureError, NotSimulatedError):
        rows = 1 if asked == "auto" else in_whole_samples(spec.recipe, min(asked, batch))
    capacity = spec.profile.device.capacity_bytes
    found = simulate_step(spec, rows=rows, length=known.tokens, row_targets=known.targets)
    beside = non_torch_memory(spec).components(found.peak_bytes)
    fits = found.peak_bytes + sum(beside.values()) <= capacity
    verdict = "fits" if fits else "fits_smaller" if _remedied_fits(spec, known) else "does_not_fit"
    return ExactPlan(verdict, capacity, found, beside, rows, -(-batch // rows), known.tokens, closed_form)


def _remedied_fits(spec: RunSpec, known: SequenceBounds) -> bool:
    """Whether a simulated micro-batch of one sequence fits with remedies that do not change what is learned."""
    for remedied in remedies(spec):
        peak_bytes = simulate_step(remedied, rows=1, length=known.tokens, row_targets=known.targets).peak_bytes
        if peak_bytes + non_torch_memory(spec).total(peak_bytes) <= spec.profile.device.capacity_bytes:
            return True
    return False
