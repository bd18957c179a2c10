"""Measured memory and time beside the plan: a run's peak by component against the prediction, calibration for later
plans, and the pace of its steps, kept for later predictions on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from engine.architecture.facts import Architecture, from_config
from engine.budget.calibration import SMALL_RUN, CalibrationKey, Residuals, is_expandable, record
from engine.budget.predict.pace import pace_of, record_pace
from engine.budget.predict.prediction import Prediction, Predictor, in_whole_samples
from engine.budget.predict.shapes import MicroBatchShape
from engine.budget.predict.simulated import SimulatedPredictor, simulated_predictor
from engine.budget.predict.step_time import StepTime
from engine.config.schema.run import RunSpec
from engine.device.allocation_tracker import bytes_of
from engine.device.base import Device
from engine.device.cuda import allocator_settings
from engine.device.nvml import driver_version
from engine.errors import NotSimulatedError, UnknownArchitectureError
from engine.journal.events import Journal
from engine.model.config import model_config_dict
from engine.train.step.context import StepContext
from engine.train.step.ladder import MemorySettings, current_settings, effective_spec
from engine.train.step.optimizer_state import state_tensors
from engine.train.step.transaction import StepOutcome


@dataclass(frozen=True)
class ProbeMemory:
    """Memory of the most expensive micro-batch, run with caches released before. Later, torch's allocator also holds
    what evaluation, saving and other shapes left, which it would give back if memory ran short."""

    peak_bytes: int
    reserved_bytes: int
    """Taken from the driver at the micro-batch's end; also the peak, as none is given back while memory suffices."""

    def fragmented_share(self, card_bytes: int) -> float | None:
        """Reserved / allocated - 1, at least 0. None if the run used too little of the card to be representative."""
        if self.peak_bytes < SMALL_RUN * card_bytes:
            return None
        return round(max(0.0, self.reserved_bytes / self.peak_bytes - 1.0), 4)


def calibrate(device: Device, ranks: int, probe: ProbeMemory | None, journal: Journal) -> None:
    """Record this run's CUDA context, workspace and fragmentation. Does nothing without CUDA, without a probe, or if
    the driver does not count memory by process; warns if the record cannot be written. The context is what the driver
    counts for this process minus what torch reserved. cuBLAS takes its workspace from torch's allocator, so it is
    measured by freeing it."""
    driver = driver_version()
    if device.kind != "cuda" or probe is None or driver is None:
        return
    properties = torch.cuda.get_device_properties(device.torch_device)
    found = _residuals(device, probe.fragmented_share(properties.total_memory))
    if found is None:
        return
    setting = CalibrationKey(
        gpu=properties.name,
        compute_capability=float(f"{properties.major}.{properties.minor}"),
        memory_gib=properties.total_memory / 2**30,
        driver=driver,
        torch=torch.__version__,
        ranks=ranks,
        expandable=is_expandable(allocator_settings()),
    )
    try:
        record(setting, found)
    except OSError as error:
        journal.warn("not_calibrated", f"this run's measurements of the device could not be saved: {error}")


def _residuals(device: Device, fragmented_share: float | None) -> Residuals | None:
    used_bytes = _used_by_this_process(device)
    if used_bytes is None:
        return None
    held = device.memory()
    torch._C._cuda_clearCublasWorkspaces()
    workspace_bytes = held.allocated_bytes - device.memory().allocated_bytes
    return Residuals(
        context_bytes=max(0, used_bytes - held.reserved_bytes),
        workspace_bytes=workspace_bytes,
        fragmented_share=fragmented_share,
    )


def _used_by_this_process(device: Device) -> int | None:
    """Bytes by the driver's count; None if it does not tell, as inside containers that hide process ids."""
    for reading in device.readings():
        for process in reading.processes:
            if process.pid == os.getpid() and process.used_bytes is not None:
                return process.used_bytes
    return None


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
    spec: RunSpec
    predictable: bool


def measured_memory(context: StepContext, peak: Peak | None) -> dict[str, Any]:
    """`{"peak_bytes", "components", "sequences", "length", "predicted"}` for the largest peak of the run's steps, in
    bytes.

    `sequences` and `length` (tokens) are of the step's micro-batch with the highest prediction. If nothing can be
    predicted, `predicted` is left out and they are of the first. Without a peak: `peak_bytes` (0) and `components`. The
    plan's prediction is another: for the longest sequences of the data, with the most targets.
    """
    trainable = context.loaded.trainable()
    on_host = context.guard.host_state.on
    adapters = bytes_of(parameter for name, parameter in trainable if "lora_" in name or "trainable_tokens" in name)
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
    """(the micro-batch with the highest prediction, peak and components); (the first, None) without a prediction."""
    try:
        predictor = _predictor(peak.spec, None)
    except (UnknownArchitectureError, NotSimulatedError):
        return peak.micro_batches[0], None
    shapes = dict.fromkeys(_on_a_rank(shape, predictor) for shape in peak.micro_batches)
    found = {shape: _step_bytes(predictor.predict_shape(shape)) for shape in shapes}
    decisive = max(found, key=found.__getitem__)
    return decisive, _components(predictor.predict_shape(decisive))


def _predictor(spec: RunSpec, row_targets: int | None) -> Predictor | SimulatedPredictor:
    """The memory formula, or the simulation (memory trace) kept on this machine. NotSimulatedError: neither exists.
    UnknownArchitectureError: nor can the run be simulated."""
    try:
        return Predictor(from_config(model_config_dict(spec)), spec, row_targets)
    except UnknownArchitectureError as unknown:
        return simulated_predictor(spec, unknown, row_targets)


def _on_a_rank(shape: MicroBatchShape, predictor: Predictor | SimulatedPredictor) -> MicroBatchShape:
    """With sequence parallelism a rank has only some positions of each sequence, and at most as many target tokens."""
    most = shape.rows * predictor.layout.positions(shape.length)
    return shape._replace(targets=min(shape.targets or 0, most))


def _step_bytes(prediction: Prediction) -> int:
    """The predicted peak inside the step, without evaluation: tensors, and on CUDA the workspaces of cuBLAS."""
    steps = max(sum(parts.values()) for name, parts in prediction.phases.items() if name not in OUTSIDE_STEPS)
    return steps + prediction.components["workspace"]


def _components(prediction: Prediction) -> dict[str, Any]:
    phases, peak_bytes = prediction.phases, _step_bytes(prediction)
    deciding = max((name for name in phases if name not in OUTSIDE_STEPS), key=lambda name: sum(phases[name].values()))
    components = {name: phases["forward"].get(name, 0) for name in STATIC}
    components["gradients"] = phases["optimizer_step"]["gradients"]
    components["activations"] = max(0, peak_bytes - sum(components.values()))
    return {"peak_bytes": peak_bytes, "components": components, "deciding_phase": deciding}


class MicroBatchReporter:
    """Writes the event `micro_batch` before the first step and at each change: how many of the longest sequences the
    micro-batch budget holds, why that changed, and the peak predicted for it with the memory settings in force."""

    def __init__(self, spec: RunSpec, context: StepContext, journal: Journal) -> None:
        self._spec, self._context, self._journal = spec, context, journal
        self._settings: MemorySettings | None = None
        self._written: tuple[int, int, dict[str, Any]] | None = None

    def update(self, step: int, *, failed: bool) -> None:
        """To be called after the probe and after each step; `failed`: memory ran out in it. Does nothing while the
        memory settings are those of the last call."""
        settings = current_settings(self._context)
        if settings == self._settings:
            return
        self._settings = settings
        rows, length = self._sequences(), int(self._context.data.lengths.max())
        predicted, before = self._predicted(rows, length), self._written
        if before == (rows, length, predicted):
            return
        self._written = (rows, length, predicted)
        self._journal.write(
            "micro_batch",
            step=step,
            sequences=rows,
            length=length,
            reason=_reason(rows, before[0] if before else None, failed=failed),
            **({"before": before[0]} if before else {}),
            **predicted,
        )

    def _sequences(self) -> int:
        """The most sequences of the longest length that cost at most the budget; one at least, which is always run."""
        context = self._context
        length, budget = int(context.data.lengths.max()), context.budget
        low, high = 1, self._spec.recipe.sequences_per_step
        while low < high:
            middle = (low + high + 1) // 2
            if context.cost(middle, length) <= budget.budget_bytes:
                low = middle
            else:
                high = middle - 1
        return in_whole_samples(self._spec.recipe, low)

    def _predicted(self, rows: int, length: int) -> dict[str, Any]:
        """The event's field `predicted`: peak, components, deciding phase, and components of each phase; no field where
        nothing can be predicted."""
        context = self._context
        if not context.measures or any(remedy.name in UNPLANNED for remedy in context.active_remedies):
            return {}
        try:
            found = _predictor(effective_spec(self._spec, context), context.bounds.targets).predict(rows, length)
        except (UnknownArchitectureError, NotSimulatedError):
            return {}
        peak = {"peak_bytes": found.peak_bytes, "components": found.components, "deciding_phase": found.deciding_phase}
        phases = {phase: {name: size for name, size in parts.items() if size} for phase, parts in found.phases.items()}
        return {"predicted": {**peak, "phases": phases}}


def _reason(rows: int, before: int | None, *, failed: bool) -> str:
    if failed:
        return "memory ran out"
    if before is None:
        return "as planned"
    return "memory is left" if rows > before else "the allocator's cache was too full" if rows < before else "a remedy"


def prediction_error(found: dict[str, Any]) -> tuple[str, str] | None:
    """(a sentence, advice) if measurement and prediction in `found` differ by more than MISS; else None."""
    foretold = found.get("predicted")
    if not foretold or abs(foretold["peak_bytes"] - found["peak_bytes"]) <= MISS * found["peak_bytes"]:
        return None
    differences = {name: found["components"][name] - foretold["components"][name] for name in found["components"]}
    name = max(differences, key=lambda each: abs(differences[each]))
    share = 100 * (foretold["peak_bytes"] / found["peak_bytes"] - 1)
    text = (
        f"memory was predicted {abs(share):.0f} % too {'high' if share > 0 else 'low'}: "
        f"{foretold['peak_bytes'] / 2**20:,.1f} MiB for {found['sequences']} × {found['length']} tokens, but "
        f"{found['peak_bytes'] / 2**20:,.1f} MiB were measured; most of the difference is in {name} "
        f"({differences[name] / 2**20:+,.1f} MiB)"
    )
    return text, "tunedeck plan --exact simulates the step instead; the run itself adapts to its measurements"


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
            journal.warn("not_calibrated", f"this run's step times could not be saved: {error}")


def _architecture(spec: RunSpec) -> Architecture | None:
    try:
        return from_config(model_config_dict(spec))
    except UnknownArchitectureError:
        return None
