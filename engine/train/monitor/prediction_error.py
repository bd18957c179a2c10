"""Compares the measured memory peak of a run, by component, with the prediction for the micro-batches of that step.

Parameters, gradients and optimizer state are added up tensor by tensor, in the 512-byte blocks that CUDA's caching
allocator and the metered device hand out; the rest of the peak counts as activations and working memory. The prediction
is divided in the same way. This prediction differs from the plan's, which assumes the longest sequences that the data
may have, and that every token counts in the loss.

Try: `tunedeck show last` after a run has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.budget.architecture.facts import from_config
from engine.budget.predict.prediction import MicroBatchShape, Prediction, Predictor
from engine.budget.predict.simulated import SimulatedPredictor, simulated_predictor
from engine.device.allocation_tracker import bytes_of
from engine.errors import NotSimulatedError, UnknownArchitectureError
from engine.model.config import model_config_dict
from engine.spec.schema.run import RunSpec
from engine.train.step.context import StepContext
from engine.train.step.optimizer_state import state_tensors

MISS = 0.05
"""Share of the peak by which a prediction may be wrong before it is worth a warning."""
OUTSIDE_STEPS = ("load", "evaluate", "generate")
STATIC = ("weights", "adapters", "optimizer")
UNPLANNED = ("chunk_loss", "max_length")
"""Remedies that the recipe has no key for, so that nothing is predicted under them."""


@dataclass(frozen=True)
class Peak:
    """The step with the highest memory peak: the peak, the step's micro-batches, and the run spec in force."""

    peak_bytes: int
    micro_batches: tuple[MicroBatchShape, ...]
    """In the order in which they ran."""
    spec: RunSpec
    predictable: bool


def measured(context: StepContext, peak: Peak | None) -> dict[str, Any]:
    """`{"peak_bytes", "components", "sequences", "length", "predicted"}` for the largest peak of the run's steps.

    `sequences` and `length` (in tokens) are those of the step's micro-batch with the highest prediction. `predicted`
    has the predicted peak and components, in bytes. Where nothing can be predicted, `predicted` is left out, and
    `sequences` and `length` are those of the first micro-batch. If `peak` is None, only `peak_bytes` (0) and
    `components` are returned.
    """
    trainable = context.loaded.trainable()
    on_host = context.guard.host_state.on
    adapters = bytes_of(parameter for name, parameter in trainable if "lora_" in name)
    components = {
        "weights": bytes_of(tensor for _, tensor in context.loaded.local_parameters()) - adapters,
        "adapters": adapters,
        "optimizer": 0 if on_host else bytes_of(tensor for _, tensor in state_tensors(context.optimizer, trainable)),
        "gradients": bytes_of(p for _, p in trainable),
    }
    peak_bytes = peak.peak_bytes if peak else 0
    components["activations"] = max(0, peak_bytes - sum(components.values()))
    found: dict[str, Any] = {"peak_bytes": peak_bytes, "components": components}
    if peak is None:
        return found
    decisive = peak.micro_batches[0]
    foretold = None
    if context.measures and peak.predictable:
        decisive, foretold = _predicted(peak)
    found |= {"sequences": decisive.rows, "length": decisive.length}
    return found | ({"predicted": foretold} if foretold else {})


def _predicted(peak: Peak) -> tuple[MicroBatchShape, dict[str, Any] | None]:
    """(the micro-batch of the step with the highest prediction, its predicted peak and components in bytes); if nothing
    can be predicted, the step's first micro-batch and None."""
    try:
        predictor = _predictor(peak.spec)
    except (UnknownArchitectureError, NotSimulatedError):
        return peak.micro_batches[0], None
    shapes = dict.fromkeys(_on_a_rank(shape, predictor) for shape in peak.micro_batches)
    found = {shape: _step_bytes(predictor.predict_shape(shape)) for shape in shapes}
    decisive = max(found, key=found.__getitem__)
    return decisive, _components(predictor.predict_shape(decisive))


def _predictor(spec: RunSpec) -> Predictor | SimulatedPredictor:
    """The memory predictor of a run: the closed form, or for a family without one the simulation (memory trace) that is
    kept on this machine.

    Raises:
        NotSimulatedError: neither exists.
        UnknownArchitectureError: neither exists, and the run cannot be simulated.
    """
    try:
        return Predictor(from_config(model_config_dict(spec)), spec)
    except UnknownArchitectureError as unknown:
        return simulated_predictor(spec, unknown)


def _on_a_rank(shape: MicroBatchShape, predictor: Predictor | SimulatedPredictor) -> MicroBatchShape:
    """The micro-batch as one rank computes it. With sequence parallelism a rank has only some positions of each
    sequence, so the number of target tokens is limited to the number of those positions."""
    most = shape.rows * predictor.layout.positions(shape.length)
    return shape._replace(targets=min(shape.targets or 0, most))


def _step_bytes(prediction: Prediction) -> int:
    """The predicted peak of what torch's allocator hands out inside the step, without evaluation and generation: the
    tensors, and on CUDA the workspaces of cuBLAS."""
    steps = max(sum(parts.values()) for name, parts in prediction.phases.items() if name not in OUTSIDE_STEPS)
    return steps + prediction.components["workspace"]


def _components(prediction: Prediction) -> dict[str, Any]:
    phases, peak_bytes = prediction.phases, _step_bytes(prediction)
    components = {name: phases["forward"].get(name, 0) for name in STATIC}
    components["gradients"] = phases["optimizer_step"]["gradients"]
    components["activations"] = max(0, peak_bytes - sum(components.values()))
    return {"peak_bytes": peak_bytes, "components": components}


def prediction_error(found: dict[str, Any]) -> tuple[str, str] | None:
    """Compare measurement and prediction in `found`, which `measured` returned. If they differ by more than the share
    MISS, returns (a sentence that says so, advice); else None."""
    foretold = found.get("predicted")
    if not foretold or abs(foretold["peak_bytes"] - found["peak_bytes"]) <= MISS * found["peak_bytes"]:
        return None
    differences = {name: found["components"][name] - foretold["components"][name] for name in found["components"]}
    name = max(differences, key=lambda each: abs(differences[each]))
    share = 100 * (foretold["peak_bytes"] / found["peak_bytes"] - 1)
    text = (
        f"memory was predicted {abs(share):.0f} % too {'high' if share > 0 else 'low'}: "
        f"{foretold['peak_bytes'] / 2**20:,.1f} MiB for {found['sequences']} × {found['length']} tokens, and "
        f"{found['peak_bytes'] / 2**20:,.1f} MiB were held; most of the difference is in {name} "
        f"({differences[name] / 2**20:+,.1f} MiB)"
    )
    return text, "tunedeck plan --exact simulates the step instead; the run itself goes by what it measures"
