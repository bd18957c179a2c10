"""The budget of a device: bytes per phase and component at a micro-batch, and the cost function that plans use.

Closed form, pure Python, well under a millisecond once an (architecture, setting) pair has been seen. Phases and
components carry the names of BUDGET.md on screen, in events and in --json.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.budget.architecture import Architecture
from engine.budget.growth import Growth, PhaseCost, Shape, prune, shape_of
from engine.budget.inference import evaluates, evaluation, generates, generation_bytes, generation_rows
from engine.budget.overhead import overhead
from engine.budget.setting import Setting, setting_of
from engine.budget.sharing import Sharing, bucket_bytes, buffers, on_one_device, sharing_of, static_of_a_rank
from engine.budget.static import optimizer_scratch
from engine.budget.step import step_cost
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
    sharing: Sharing

    def bytes(self, rows: int, length: int) -> int:
        """Bytes above `static_bytes` at the peak of a micro-batch of `rows` sequences padded to `length` tokens."""
        shape = shape_of(rows, self.sharing.positions(length), self.chunk_tokens)
        return max(growth.at(shape) for growth in self.growths)


def cost_model(arch: Architecture, spec: RunSpec) -> CostModel:
    """The cost function of a run; cheap enough to be called for every candidate of every step.

    It is that of a micro-batch after the first of its step, when earlier gradients are held: the dearer kind.
    """
    sharing = sharing_of(spec.profile)
    return _cost_model(arch, setting_of(arch, spec), batch_of_a_rank(spec, sharing) > 1, sharing)


def batch_of_a_rank(spec: RunSpec, sharing: Sharing) -> int:
    """Sequences of a step that one rank works on, or shares with its neighbours."""
    return -(-spec.recipe.train.batch_size // sharing.rows_apart)


@lru_cache(maxsize=256)
def _cost_model(arch: Architecture, setting: Setting, accumulating: bool, sharing: Sharing) -> CostModel:
    static = static_of_a_rank(arch, setting, sharing).static + bucket_bytes(arch, setting, sharing)
    growths = _growths(arch, setting, accumulating, sharing)
    return CostModel(static, growths, setting.chunk_tokens, sharing)


def _growths(arch: Architecture, setting: Setting, accumulating: bool, sharing: Sharing) -> tuple[Growth, ...]:
    """Every live set that decides some shape, above the static bytes."""
    gradients = static_of_a_rank(arch, setting, sharing).gradients
    candidates = [Growth(gradients + optimizer_scratch(arch, setting))]
    for phases in step_cost(arch, setting, accumulating, sharing).values():
        for phase in phases:
            around = phase.saved.plus(phase.inputs).plus(Growth(phase.gradients + phase.buffers))
            candidates.extend(around.plus(working) for working in phase.working)
    return prune(candidates)


def predict(arch: Architecture, spec: RunSpec, *, rows: int, length: int) -> Prediction:
    """The whole table for a micro-batch of `rows` sequences padded to `length` tokens."""
    setting, sharing = setting_of(arch, spec), sharing_of(spec.profile)
    shape = shape_of(rows, sharing.positions(length), setting.chunk_tokens)
    total = static_of_a_rank(arch, setting, sharing)
    held = {"weights": total.weights, "adapters": total.adapters, "optimizer": total.optimizer}
    above: dict[str, dict[str, int]] = {}
    for name, costs in step_cost(arch, setting, rows < batch_of_a_rank(spec, sharing), sharing).items():
        above[name] = _components(max(costs, key=lambda cost: cost.at(shape)), shape)
    above["optimizer_step"] = {"gradients": total.gradients, "optimizer": optimizer_scratch(arch, setting)}
    alone = shape_of(_rows_alone(arch, spec, rows, length), length, setting.chunk_tokens)
    above |= _inference(arch, spec, setting, sharing, alone, length)
    phases = {"load": {"weights": total.weights, "adapters": total.adapters}}
    bucket = bucket_bytes(arch, setting, sharing)
    phases |= {name: _added(held, parts, {"buffers": bucket} if bucket else {}) for name, parts in above.items()}
    sums = {phase: sum(parts.values()) for phase, parts in phases.items()}
    deciding = max(sums, key=sums.__getitem__)
    beside = overhead(spec.profile, sums[deciding])
    components = dict.fromkeys(COMPONENTS, 0) | phases[deciding] | beside
    return Prediction(phases, sums[deciding], deciding, components, sum(components.values()))


def _rows_alone(arch: Architecture, spec: RunSpec, rows: int, length: int) -> int:
    """Sequences that the first rank evaluates at once within the budget of `rows` that are shared."""
    sequence = spec.profile.parallel.sequence
    if sequence == 1:
        return rows
    budget_bytes, alone = cost_model(arch, spec).bytes(rows, length), cost_model(arch, on_one_device(spec))
    fitting = (fewer for fewer in range(rows // sequence + 1, 1, -1) if alone.bytes(fewer, length) <= budget_bytes)
    return next(fitting, 1)


def _inference(
    arch: Architecture, spec: RunSpec, setting: Setting, sharing: Sharing, shape: Shape, length: int
) -> dict[str, dict[str, int]]:
    """The rows `evaluate` and `generate` above the static bytes, where training stops for them."""
    phases: dict[str, dict[str, int]] = {}
    if evaluates(spec.recipe):
        size = max(peak.at(shape) for peak in evaluation(arch, setting))
        phases["evaluate"] = {"activations": size, "buffers": buffers(arch, setting, sharing, "evaluate")}
    if generates(spec.recipe):
        room = spec.profile.device.capacity_bytes - static_of_a_rank(arch, setting, sharing).static
        rows = generation_rows(arch, setting, spec.recipe, length=length, room_bytes=room)
        new_tokens = spec.recipe.generate.max_new_tokens
        size = generation_bytes(arch, setting, rows=rows, prompt=length, new_tokens=new_tokens)
        phases["generate"] = {"activations": size, "buffers": buffers(arch, setting, sharing, "generate")}
    return phases


def _added(*rows: dict[str, int]) -> dict[str, int]:
    """Rows of the table added up, component by component."""
    sums: dict[str, int] = {}
    for row in rows:
        for name, size in row.items():
            sums[name] = sums.get(name, 0) + size
    return {name: sums[name] for name in COMPONENTS if name in sums}


def _components(phase: PhaseCost, shape: Shape) -> dict[str, int]:
    """One row of the table above the static bytes."""
    parts = dict.fromkeys(("gradients", "activations", "recompute", "loss", "buffers"), 0)
    parts["gradients"] += phase.gradients
    parts["activations"] += phase.saved.at(shape)
    parts["buffers"] += phase.inputs.at(shape) + phase.buffers
    parts[phase.label] += max(working.at(shape) for working in phase.working)
    return {component: size for component, size in parts.items() if size}
