"""The budget of a device: bytes per phase and component at a micro-batch, and the cost function that plans use.

Closed form, pure Python, well under a millisecond once an (architecture, setting) pair has been seen. Phases and
components carry the names of BUDGET.md on screen, in events and in --json.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.budget.architecture import Architecture
from engine.budget.growth import Growth, PhaseCost, Shape, dearest, deciding, highest_value, most_rows, shape_of, value
from engine.budget.inference import evaluates, evaluation, generates, generation_bytes, generation_rows
from engine.budget.overhead import beside_of
from engine.budget.setting import Setting, for_rows, setting_of
from engine.budget.sharing import ALONE, Sharing, bucket_bytes, shards, sharing_of, static_of_a_rank
from engine.budget.static import optimizer_scratch
from engine.budget.step import least_at_once, step_cost
from engine.budget.walks import felt_by_step
from engine.spec.schema.run import RunSpec

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
    setting = for_rows(arch, setting, 1)  # the dearer one, for any number of rows
    at_its_end = PhaseCost(gradients, 0, (optimizer_scratch(arch, setting),), "optimizer", 0)
    phases = step_cost(arch, setting, accumulating, sharing).values()
    return deciding([at_its_end, *(cost for phase in phases for cost in phase)])


def predict(arch: Architecture, spec: RunSpec, *, rows: int, length: int) -> Prediction:
    """The whole table for a micro-batch of `rows` sequences padded to `length` tokens."""
    return Budget(arch, spec).table(rows, length)


class Budget:
    """Of one run: what depends on no shape is looked up once, so that many shapes can be asked for."""

    def __init__(self, arch: Architecture, spec: RunSpec) -> None:
        self.arch, self.recipe, self.sharing = arch, spec.recipe, sharing_of(spec.profile)
        self.batch = batch_of_a_rank(spec, self.sharing)
        self._beside = beside_of(spec.profile)
        self._capacity_bytes = spec.profile.device.capacity_bytes
        self._most_bytes = self._beside.room(self._capacity_bytes)
        self._evaluates = evaluates(self.recipe)
        self._train_as(setting_of(arch, spec))

    def _train_as(self, setting: Setting) -> None:
        self.setting = setting
        self.total = static_of_a_rank(self.arch, setting, self.sharing)
        self._bucket_bytes = bucket_bytes(self.arch, setting, self.sharing)
        self._scratch_bytes = optimizer_scratch(self.arch, setting)
        self._felt = felt_by_step(setting)
        self._answers: dict[int, int] = {}
        self._last: tuple[tuple[int, int], dict[str, tuple[int, PhaseCost]]] = (0, 0), {}
        self.room_bytes = self._most_bytes - self.total.static - self._bucket_bytes
        """What is left of capacity above what the run holds anyway; negative where that alone is too much."""
        self.end_bytes = self.total.gradients + self._scratch_bytes
        """Above the same: what a step holds at its end."""

    @property
    def least_bytes(self) -> int:
        """What a step holds at its end, were there no optimizer: the model and its gradients."""
        return self.total.weights + self.total.adapters + self.total.gradients

    def remedied(self, changes: Mapping[str, Any]) -> Budget:
        """Of the same run with other values for some of the choices that a setting has."""
        other = copy(self)
        other._train_as(self.setting.but(**changes))
        return other

    def at_least_bytes(self, length: int) -> int:
        """A bound from below to `above_bytes` of the whole batch at once, for a fraction of the work."""
        sizes = least_at_once(self.arch, self._felt_of(self.batch), spread=self.sharing.sharded)
        return highest_value(sizes, self._shape(self.batch, length))

    def at_most_rows(self, length: int) -> int:
        """A bound from above to the sequences of a smaller micro-batch that `room_bytes` are enough for: as a rule the
        number itself, by the loss and the first layer that backward comes to."""
        phases = step_cost(self.arch, self._felt, True, self.sharing)
        room, positions, chunk = self.room_bytes, self.sharing.positions(length), self.setting.chunk_tokens
        costs = phases["loss_backward"] + phases.get("layer_first", ())[:1]
        most = [most_rows(size, room, positions, chunk) for cost in costs if not cost.closer for size in cost.sizes()]
        return max(0, min(self.batch - 1, *most))

    def above_bytes(self, rows: int, length: int) -> int:
        """The table's largest row above what the run holds anyway, without the table."""
        above = [self.end_bytes, *[size for size, _ in self._deciding(rows, length).values()]]
        if self._evaluates:
            above += [sum(parts.values()) for parts in self._inference(rows, length).values()]
        return max(above)

    def table(self, rows: int, length: int) -> Prediction:
        """The whole of it."""
        shape, total = self._shape(rows, length), self.total
        phases = {"load": {"weights": total.weights, "adapters": total.adapters}}
        for name, (size, cost) in self._deciding(rows, length).items():
            phases[name] = self._row(_parts(size, cost, shape))
        phases["optimizer_step"] = self._row({"gradients": total.gradients, "optimizer": self._scratch_bytes})
        if self._evaluates:
            phases |= {name: self._row(parts) for name, parts in self._inference(rows, length).items()}
        sums = {phase: sum(parts.values()) for phase, parts in phases.items()}
        deciding = max(sums, key=sums.__getitem__)
        components = dict.fromkeys(COMPONENTS, 0) | phases[deciding] | self._beside.of(sums[deciding])
        return Prediction(phases, sums[deciding], deciding, components, sum(components.values()))

    def _deciding(self, rows: int, length: int) -> dict[str, tuple[int, PhaseCost]]:
        """Of each phase the alternative that decides, and its bytes; kept for the shape last asked for."""
        if self._last[0] != (rows, length):
            shape = self._shape(rows, length)
            costs = step_cost(self.arch, self._felt_of(rows), rows < self.batch, self.sharing)
            self._last = (rows, length), {name: dearest(phase, shape) for name, phase in costs.items()}
        return self._last[1]

    def _row(self, parts: dict[str, int]) -> dict[str, int]:
        """A row of the table: what is held anyway, and as far as there is any what comes on top, in their order."""
        total = self.total
        row = {"weights": total.weights, "adapters": total.adapters}
        if "gradients" in parts:
            row["gradients"] = parts["gradients"]
        row["optimizer"] = total.optimizer + parts.get("optimizer", 0)
        for name in ("activations", "recompute", "loss"):
            if name in parts:
                row[name] = parts[name]
        if self._bucket_bytes or "buffers" in parts:
            row["buffers"] = parts.get("buffers", 0) + self._bucket_bytes
        return row

    def _felt_of(self, rows: int) -> Setting:
        """What a step of so many sequences feels of the setting."""
        return for_rows(self.arch, self._felt, rows)

    def _shape(self, rows: int, length: int) -> Shape:
        return shape_of(rows, self.sharing.positions(length), self.setting.chunk_tokens)

    def _inference(self, rows: int, length: int) -> dict[str, dict[str, int]]:
        """The rows `evaluate` and `generate` above the static bytes, of a run that stops to evaluate."""
        arch, setting = self.arch, self.setting
        spread = shards(arch, setting, self.sharing)
        shape = shape_of(self._rows_alone(rows, length), length, setting.chunk_tokens)
        size = max([peak.at(shape) for peak in evaluation(arch, self._felt_of(rows))])
        phases = {"evaluate": {"activations": size, "buffers": spread.evaluate() if spread else 0}}
        if generates(self.recipe):
            size = self._generation_bytes(length)
            phases["generate"] = {"activations": size, "buffers": spread.generate() if spread else 0}
        return phases

    def _rows_alone(self, rows: int, length: int) -> int:
        """Sequences that the first rank evaluates at once within the budget of `rows` that are shared."""
        sequence = self.sharing.sequence
        if sequence == 1:
            return rows
        budget_bytes = _cost_model(self.arch, self.setting, self.batch > 1, self.sharing).bytes(rows, length)
        alone = _cost_model(self.arch, self.setting.but(sequence=1), self.recipe.train.batch_size > 1, ALONE)
        fitting = (fewer for fewer in range(rows // sequence + 1, 1, -1) if alone.bytes(fewer, length) <= budget_bytes)
        return next(fitting, 1)

    def _generation_bytes(self, length: int) -> int:
        """Answers are written as many at once as there is room for, whatever the micro-batch."""
        if length not in self._answers:
            rows, tokens = self.generation_rows(length), self.recipe.generate.max_new_tokens
            made_bytes = generation_bytes(self.arch, self.setting, rows=rows, prompt=length, new_tokens=tokens)
            self._answers[length] = made_bytes
        return self._answers[length]

    def generation_rows(self, length: int) -> int:
        """How many answers to prompts of `length` tokens are written at once."""
        room_bytes = self._capacity_bytes - self.total.static
        return generation_rows(self.arch, self.setting, self.recipe, length=length, room_bytes=room_bytes)


def _parts(size: int, phase: PhaseCost, shape: Shape) -> dict[str, int]:
    """What a phase holds above the static bytes, `size` in all, as far as it holds any."""
    kept, beside = value(phase.saved, shape), value(phase.inputs, shape) + phase.buffers
    parts = {"gradients": phase.gradients} if phase.gradients else {}
    if kept:
        parts["activations"] = kept
    if beside:
        parts["buffers"] = beside
    working = size - phase.gradients - kept - beside
    if working:
        parts[phase.label] = parts.get(phase.label, 0) + working
    return parts
