"""Simulates one optimizer step of one shape, and the evaluation and generation that follow it in the recipe: the
verdict and peak of `plan --exact`.

All layers are simulated (about 0.1 s each), so nothing is assumed about which layer has the peak. "Closed form" means
the budget's usual prediction, which `plan` shows without --exact. It also chooses the micro-batch to simulate; if it
does not know the architecture, a kept simulation does, and without one "auto" means one sequence.

Try: `tunedeck plan -p 80gb -r lora --set model.id=Qwen/Qwen2.5-7B --exact`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.architecture.lookup import find_architecture
from engine.budget.advise.plan import make_plan, remedies
from engine.budget.predict.inference import evaluates, generates, most_answers
from engine.budget.predict.non_torch_memory import non_torch_memory
from engine.budget.predict.prediction import Predictor, in_whole_samples
from engine.budget.predict.recompute import recomputing_stack
from engine.budget.trace.memory_config import chunk_tokens, memory_config_of
from engine.config.changes import with_changes
from engine.config.files.caches import SequenceBounds, known_bounds
from engine.config.schema.run import RunSpec
from engine.errors import NotSimulatedError, UnknownArchitectureError, UsageError
from engine.extras.simulate.batch import StepShape, images_of_rows
from engine.extras.simulate.driver import SimulatedRun, simulated_run
from engine.extras.simulate.recorders import PhasePeaks


@dataclass(frozen=True)
class Simulation:
    """The result of a simulated step: peak bytes by phase, and the bytes that remain allocated throughout."""

    phases: dict[str, dict[str, int]]
    """Bytes by phase and component, named as in a plan. Gradients are those at the beginning of the phase; activations
    are the rest of the phase's peak."""
    static_bytes: int

    @property
    def sums(self) -> dict[str, int]:
        """Peak bytes of each phase, the sum over its components."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the whole step."""
        return max(self.sums.values())

    @property
    def deciding_phase(self) -> str:
        """Name of the phase with the highest peak."""
        sums = self.sums
        return max(sums, key=sums.__getitem__)

    @property
    def components(self) -> dict[str, int]:
        """Bytes by component in the deciding phase; their sum is the peak."""
        return self.phases[self.deciding_phase]


def simulate_step(spec: RunSpec, *, rows: int, length: int, row_targets: int | None = None) -> Simulation:
    """Simulate a step of two micro-batches (or one, for a smaller batch) of `rows` sequences of `length` tokens, of
    which `row_targets` are targets of the loss; all but one of the micro-batch where that is more, or None.

    If the recipe evaluates, an evaluation of `rows` sequences is simulated, too; if the recipe generates answers, so is
    the generation of answers to prompts of `length` tokens.

    Raises:
        UsageError: a 4-bit base, which needs CUDA kernels; sequence parallelism; an invalid config of the model.
    """
    if spec.recipe.model.quantize != "none":
        raise UsageError("a 4-bit base cannot be simulated", fix="leave out --exact: the memory formula covers it")
    if spec.profile.parallel.sequence > 1:
        raise UsageError(
            "sequence parallelism cannot be simulated on one device",
            fix="leave out --exact: the memory formula covers each rank",
        )
    with simulated_run(spec, partial(PhasePeaks, ends=_ends(spec)), row_images=images_of_rows(spec)) as run:
        return _simulated(run, rows, length, rows * (length if row_targets is None else row_targets))


def _simulated(run: SimulatedRun[PhasePeaks], rows: int, length: int, targets: int) -> Simulation:
    spec, held = run.spec, run.static_components()
    chunk = chunk_tokens(run.head.vocabulary, spec.profile.device.capacity_bytes)
    shape = StepShape(rows, length, min(targets, rows * (length - 1) - 1), chunk, rows)
    for _ in range(min(2, -(-spec.recipe.sequences_per_step // rows))):
        run.micro_batch(shape)
    run.optimizer_step()
    if evaluates(spec.recipe):
        run.end_training()
        run.evaluate(shape)
    if generates(spec.recipe):
        run.generate(rows=_answers_at_once(spec, length), prompt=length)
    return Simulation({phase: _row(held, *found) for phase, found in run.recorder.by_phase.items()}, run.static_bytes)


def _answers_at_once(spec: RunSpec, length: int) -> int:
    """Return how many answers the plan of the recipe generates at once for prompts of `length` tokens; the largest
    number allowed if the architecture is unknown."""
    try:
        return Predictor(find_architecture(spec), spec).generation_rows(length)
    except UnknownArchitectureError:
        return most_answers(spec.recipe)


def _ends(spec: RunSpec) -> dict[int, str]:
    """Map layer numbers to the phase that a plan names after the layer's backward pass ("layer_first", "layer_last");
    the other layers need no more memory and have no phase. Empty for an unknown architecture."""
    try:
        arch = find_architecture(spec)
    except UnknownArchitectureError:
        return {}
    setting = memory_config_of(arch, spec)
    even = setting.checkpointing and not setting.kept_layers
    return recomputing_stack(arch, setting).ends(checkpointed=even)


def _row(held: dict[str, int], peak_bytes: int, gradient_bytes: int) -> dict[str, int]:
    """Return one phase's peak by component, in bytes. `held` has the static components; what is left of `peak_bytes`
    after these and `gradient_bytes` counts as activations."""
    rest = peak_bytes - sum(held.values()) - gradient_bytes
    return {**held, "gradients": gradient_bytes, "activations": max(0, rest)}


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
    """The memory formula's bytes by phase and component for the same micro-batch; None for an unknown architecture."""

    @property
    def closed_form_bytes(self) -> int | None:
        """Peak bytes that the memory formula predicts; None if it does not know the architecture."""
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
    """Plan by simulating a step with the micro-batch that the memory formula chooses.

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
    """Whether a simulated micro-batch of one sequence fits with remedies that do not change the training result."""
    for remedied in remedies(spec):
        peak_bytes = simulate_step(remedied, rows=1, length=known.tokens, row_targets=known.targets).peak_bytes
        if peak_bytes + non_torch_memory(spec).total(peak_bytes) <= spec.profile.device.capacity_bytes:
            return True
    return False
