"""Simulates one optimizer step of one shape, and the evaluation and generation that follow it in the recipe.

All layers are simulated (about 0.1 s each), so nothing is assumed about which layer has the peak.

Try: `tunedeck plan -p 80gb -r lora --set model.id=Qwen/Qwen2.5-7B --exact`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from engine.budget.architecture.lookup import find_architecture
from engine.budget.predict.inference import evaluates, generates, most_answers
from engine.budget.predict.prediction import Predictor
from engine.budget.predict.recompute import recomputing_stack
from engine.budget.trace.memory_config import chunk_tokens, memory_config_of
from engine.config.schema.run import RunSpec
from engine.errors import UnknownArchitectureError, UsageError
from engine.simulate.batch import StepShape
from engine.simulate.driver import SimulatedRun, simulated_run
from engine.simulate.images import images_of_rows
from engine.simulate.recorders import PhasePeaks


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
        raise UsageError("a 4-bit base cannot be simulated", fix="leave --exact out: the closed form knows it")
    if spec.profile.parallel.sequence > 1:
        raise UsageError(
            "sequence parallelism cannot be simulated on one device",
            fix="leave --exact out: the closed form knows what each rank holds",
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
