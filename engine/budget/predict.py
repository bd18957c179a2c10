"""The budget of one device: bytes per phase and component at a micro-batch, and the cost function that plans use.

Closed form, pure Python, well under a millisecond once an (architecture, setting) pair has been seen. Phases and
components carry the names of BUDGET.md on screen, in events and in --json.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.budget.architecture import Architecture
from engine.budget.inference import evaluates, evaluation, generates, generation_bytes, generation_rows
from engine.budget.overhead import overhead
from engine.budget.setting import Setting, setting_of
from engine.budget.static import optimizer_scratch, static_bytes
from engine.budget.step import (
    Growth,
    PhaseCost,
    Shape,
    prune,
    shape_of,
    step_cost,
)
from engine.spec.run import RunSpec

COMPONENTS = (
    "weights", "adapters", "gradients", "optimizer", "activations", "recompute", "loss", "buffers",
    "workspace", "context", "fragmentation",
)
"""Rows of the table. Workspace, context and fragmentation are outside what torch allocates."""


@dataclass(frozen=True)
class Prediction:
    """Peak bytes that torch allocates, per phase and component, and on the device as a whole."""

    phases: dict[str, dict[str, int]]
    peak_bytes: int
    deciding_phase: str
    components: dict[str, int]
    """The deciding phase's row of the table, with what the device holds beside it; adds up to `device_bytes`."""
    device_bytes: int
    """What the driver would show: the peak plus context, workspaces and fragmentation."""


@dataclass(frozen=True)
class CostModel:
    """Predicted bytes of a micro-batch above what the run holds anyway. Monotone in both arguments."""

    static_bytes: int
    growths: tuple[Growth, ...]
    """Live sets, one of which decides at any shape."""
    chunk_tokens: int

    def bytes(self, rows: int, length: int) -> int:
        """Bytes above `static_bytes` at the peak of a micro-batch of `rows` sequences padded to `length` tokens."""
        shape = shape_of(rows, length, self.chunk_tokens)
        return max(growth.at(shape) for growth in self.growths)


def cost_model(arch: Architecture, spec: RunSpec) -> CostModel:
    """The cost function of a run; cheap enough to be called for every candidate of every step.

    It is that of a micro-batch after the first of its step, when earlier gradients are held: the dearer kind.
    """
    return _cost_model(arch, setting_of(arch, spec), spec.recipe.train.batch_size > 1)


@lru_cache(maxsize=256)
def _cost_model(arch: Architecture, setting: Setting, accumulating: bool) -> CostModel:
    static = static_bytes(arch, setting).total.static
    growths = _growths(arch, setting, accumulating)
    return CostModel(static, growths, setting.chunk_tokens)


def _growths(arch: Architecture, setting: Setting, accumulating: bool) -> tuple[Growth, ...]:
    """Every live set that decides some shape, above the static bytes."""
    candidates = [Growth(static_bytes(arch, setting).total.gradients + optimizer_scratch(arch, setting))]
    for phases in step_cost(arch, setting, accumulating).values():
        for phase in phases:
            around = phase.saved.plus(phase.inputs).plus(Growth(phase.gradients))
            candidates.extend(around.plus(working) for working in phase.working)
    return prune(candidates)


def predict(arch: Architecture, spec: RunSpec, *, rows: int, length: int) -> Prediction:
    """The whole table for a micro-batch of `rows` sequences padded to `length` tokens."""
    setting = setting_of(arch, spec)
    shape = shape_of(rows, length, setting.chunk_tokens)
    total = static_bytes(arch, setting).total
    held = {"weights": total.weights, "adapters": total.adapters, "optimizer": total.optimizer}
    phases = {"load": {"weights": total.weights, "adapters": total.adapters}}
    for name, costs in step_cost(arch, setting, rows < spec.recipe.train.batch_size).items():
        phases[name] = held | _components(max(costs, key=lambda cost: cost.at(shape)), shape)
    scratch = optimizer_scratch(arch, setting)
    phases["optimizer_step"] = {**held, "gradients": total.gradients, "optimizer": total.optimizer + scratch}
    phases |= {name: held | parts for name, parts in _inference(arch, spec, setting, shape, length).items()}
    sums = {phase: sum(parts.values()) for phase, parts in phases.items()}
    deciding = max(sums, key=sums.__getitem__)
    beside = overhead(spec.profile.device, sums[deciding])
    components = dict.fromkeys(COMPONENTS, 0) | phases[deciding] | beside
    return Prediction(phases, sums[deciding], deciding, components, sum(components.values()))


def _inference(
    arch: Architecture, spec: RunSpec, setting: Setting, shape: Shape, length: int
) -> dict[str, dict[str, int]]:
    """The rows `evaluate` and `generate` above the static bytes, where training stops for them."""
    phases: dict[str, dict[str, int]] = {}
    if evaluates(spec.recipe):
        phases["evaluate"] = {"activations": max(peak.at(shape) for peak in evaluation(arch, setting))}
    if generates(spec.recipe):
        room = spec.profile.device.capacity_bytes - static_bytes(arch, setting).total.static
        rows = generation_rows(arch, setting, spec.recipe, length=length, room_bytes=room)
        new_tokens = spec.recipe.generate.max_new_tokens
        size = generation_bytes(arch, setting, rows=rows, prompt=length, new_tokens=new_tokens)
        phases["generate"] = {"activations": size}
    return phases


def _components(phase: PhaseCost, shape: Shape) -> dict[str, int]:
    """One row of the table above the static bytes."""
    parts = dict.fromkeys(("gradients", "activations", "recompute", "loss", "buffers"), 0)
    parts["gradients"] += phase.gradients
    parts["activations"] += phase.saved.at(shape)
    parts["buffers"] += phase.inputs.at(shape)
    parts[phase.label] += max(working.at(shape) for working in phase.working)
    return {component: size for component, size in parts.items() if size}
