"""The prediction of a device's memory: bytes per phase and component at a micro-batch, and the cost of a micro-batch.

A prediction evaluates polynomials that were traced once per (architecture, config). The names of phases and components
are those on screen, in events and in --json.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from engine.budget.architecture.facts import Architecture
from engine.budget.predict.inference import evaluates, evaluation, generates, generation_bytes, generation_rows
from engine.budget.predict.layer_traces import step_config
from engine.budget.predict.non_torch_memory import non_torch_memory
from engine.budget.predict.parallel_layout import (
    SINGLE_DEVICE,
    ParallelLayout,
    bucket_bytes,
    layout_of,
    shards,
    static_of_a_rank,
)
from engine.budget.predict.phase import PhaseCost, costliest
from engine.budget.predict.static import optimizer_scratch
from engine.budget.predict.step import step_cost
from engine.budget.trace.memory_config import MemoryConfig, for_rows, memory_config_of
from engine.budget.trace.polynomial import BYTE, NO_BYTES, BytesPolynomial, highest, highest_value, shape_of
from engine.spec.schema.run import RunSpec

COMPONENTS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "recompute",
    "loss",
    "buffers",
    "workspace",
    "context",
    "fragmentation",
)
"""Components of a prediction. Workspace, context and fragmentation are outside what torch allocates."""


@dataclass(frozen=True)
class Prediction:
    """Peak bytes that torch allocates, per phase and component, and on the device as a whole."""

    phases: dict[str, dict[str, int]]
    peak_bytes: int
    deciding_phase: str
    components: dict[str, int]
    """The deciding phase's row of the table, and non-torch memory; adds up to `device_bytes`."""
    device_bytes: int
    """What the driver would show: the peak plus context, workspaces and fragmentation."""


@dataclass(frozen=True)
class CostModel:
    """Predicted bytes of a micro-batch above what the run holds anyway. Monotone in both arguments."""

    static_bytes: int
    sizes: tuple[BytesPolynomial, ...]
    """Live sets, one of which decides at any shape."""
    chunk_tokens: int
    layout: ParallelLayout

    def bytes(self, rows: int, length: int) -> int:
        """Bytes above `static_bytes` at the peak of a micro-batch of `rows` sequences padded to `length` tokens."""
        return highest_value(self.sizes, shape_of(rows, self.layout.positions(length), self.chunk_tokens))


def cost_model(arch: Architecture, spec: RunSpec) -> CostModel:
    """The micro-batch cost of a run; cheap enough to be asked for every candidate of every step.

    It is the cost of a micro-batch after the first of its step, which finds the gradients of earlier ones.
    """
    layout = layout_of(spec.profile)
    return _cost_model(arch, memory_config_of(arch, spec), batch_of_a_rank(spec, layout) > 1, layout)


def batch_of_a_rank(spec: RunSpec, layout: ParallelLayout) -> int:
    """Sequences of a step that one rank works on, or shares with the other ranks of its sequence."""
    return -(-spec.recipe.train.batch_size // layout.sequence_groups)


@lru_cache(maxsize=256)
def _cost_model(arch: Architecture, config: MemoryConfig, accumulating: bool, layout: ParallelLayout) -> CostModel:
    total = static_of_a_rank(arch, config, layout)
    end = PhaseCost(total.gradients, NO_BYTES, (optimizer_scratch(arch, config) * BYTE,), "optimizer", NO_BYTES)
    # A single row may cost more than several: the model is for any number of rows.
    phases = step_cost(arch, for_rows(arch, config, 1), accumulating, layout).values()
    sizes = highest([size for cost in (end, *sum(phases, ())) for size in cost.sizes()])
    return CostModel(total.static + bucket_bytes(arch, config, layout), sizes, config.chunk_tokens, layout)


def predict(arch: Architecture, spec: RunSpec, *, rows: int, length: int) -> Prediction:
    """The whole table for a micro-batch of `rows` sequences padded to `length` tokens."""
    return Predictor(arch, spec).predict(rows, length)


class Predictor:
    """Predictions for micro-batches of one run."""

    def __init__(self, arch: Architecture, spec: RunSpec) -> None:
        self.arch, self.recipe, self.layout = arch, spec.recipe, layout_of(spec.profile)
        self.config = memory_config_of(arch, spec)
        self.batch = batch_of_a_rank(spec, self.layout)
        self.capacity_bytes = spec.profile.device.capacity_bytes
        self.total = static_of_a_rank(arch, self.config, self.layout)
        self._non_torch = non_torch_memory(spec.profile)
        self._bucket_bytes = bucket_bytes(arch, self.config, self.layout)

    def fits(self, rows: int, length: int) -> bool:
        """Whether the peak is within capacity."""
        return self.predict(rows, length).device_bytes <= self.capacity_bytes

    def predict(self, rows: int, length: int) -> Prediction:
        """The whole table for a micro-batch of `rows` sequences padded to `length` tokens."""
        shape = shape_of(rows, self.layout.positions(length), self.config.chunk_tokens)
        config = for_rows(self.arch, step_config(self.config), rows)
        phases = {"load": {"weights": self.total.weights, "adapters": self.total.adapters}}
        for name, costs in step_cost(self.arch, config, rows < self.batch, self.layout).items():
            phases[name] = self._row(costliest(costs, shape).components(shape))
        scratch_bytes = optimizer_scratch(self.arch, self.config)
        phases["optimizer_step"] = self._row({"gradients": self.total.gradients, "optimizer": scratch_bytes})
        if evaluates(self.recipe):
            phases["evaluate"] = self._row(self._evaluation(config, rows, length))
        if generates(self.recipe):
            phases["generate"] = self._row(self._generation(length))
        sums = {phase: sum(parts.values()) for phase, parts in phases.items()}
        deciding = max(sums, key=sums.__getitem__)
        components = dict.fromkeys(COMPONENTS, 0) | phases[deciding] | self._non_torch.components(sums[deciding])
        return Prediction(phases, sums[deciding], deciding, components, sum(components.values()))

    def _row(self, parts: dict[str, int]) -> dict[str, int]:
        """A row of the table in the order of its components: the static bytes, and the `parts` on top of them."""
        total = self.total
        row = {"weights": total.weights, "adapters": total.adapters}
        if "gradients" in parts:
            row["gradients"] = parts["gradients"]
        row["optimizer"] = total.optimizer + parts.get("optimizer", 0)
        row |= {name: parts[name] for name in ("activations", "recompute", "loss") if name in parts}
        if self._bucket_bytes or "buffers" in parts:
            row["buffers"] = parts.get("buffers", 0) + self._bucket_bytes
        return row

    def _evaluation(self, config: MemoryConfig, rows: int, length: int) -> dict[str, int]:
        """Bytes of evaluation above the static bytes; rank 0 evaluates, with whole sequences."""
        shape = shape_of(self._rows_alone(rows, length), length, self.config.chunk_tokens)
        spread = shards(self.arch, self.config, self.layout)
        size = highest_value(evaluation(self.arch, config), shape)
        return {"activations": size, "buffers": spread.evaluate() if spread else 0}

    def _rows_alone(self, rows: int, length: int) -> int:
        """Sequences that rank 0 evaluates at once within the bytes of `rows` that several ranks share."""
        sequence = self.layout.sequence
        if sequence == 1:
            return rows
        shared = _cost_model(self.arch, self.config, self.batch > 1, self.layout)
        alone_config = replace(self.config, sequence=1)
        alone = _cost_model(self.arch, alone_config, self.recipe.train.batch_size > 1, SINGLE_DEVICE)
        most_bytes = shared.bytes(rows, length)
        fitting = (fewer for fewer in range(rows // sequence + 1, 1, -1) if alone.bytes(fewer, length) <= most_bytes)
        return next(fitting, 1)

    def _generation(self, length: int) -> dict[str, int]:
        """Bytes of generation above the static bytes, with as many answers at once as there is room for."""
        rows, new_tokens = self.generation_rows(length), self.recipe.generate.max_new_tokens
        spread = shards(self.arch, self.config, self.layout)
        size = generation_bytes(self.arch, self.config, rows=rows, prompt=length, new_tokens=new_tokens)
        return {"activations": size, "buffers": spread.generate() if spread else 0}

    def generation_rows(self, length: int) -> int:
        """How many answers to prompts of `length` tokens are written at once."""
        room_bytes = self.capacity_bytes - self.total.static
        return generation_rows(self.arch, self.config, self.recipe, length=length, room_bytes=room_bytes)
