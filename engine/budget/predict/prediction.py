"""Predicts a device's memory for a micro-batch: bytes per phase and component, and the micro-batch cost.

A prediction evaluates polynomials that are traced once per (architecture, config). The names of phases and components
also appear on screen, in events and in `--json`.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.architecture.facts import Architecture
from engine.budget.predict.inference import evaluates, evaluation, generates, generation_bytes, generation_rows
from engine.budget.predict.layer_traces import step_config
from engine.budget.predict.non_torch_memory import host_bytes, host_capacity_bytes, non_torch_memory
from engine.budget.predict.parallel_layout import (
    SINGLE_DEVICE,
    ParallelLayout,
    bucket_bytes,
    layout_of,
    shards,
    static_of_a_rank,
)
from engine.budget.predict.shapes import MicroBatchShape
from engine.budget.predict.static import optimizer_scratch, update_scratch
from engine.budget.predict.step import PhaseCost, costliest, step_cost
from engine.budget.trace.memory_config import MemoryConfig, for_rows, memory_config_of
from engine.budget.trace.polynomial import BYTE, NO_BYTES, BytesPolynomial, highest, highest_value, shape_of
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import RunSpec

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
"""The last three are not the model's tensors. The scratch of attention's backward pass and of the optimizer's update
counts as `buffers`."""


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of one device in bytes: `phases` and `peak_bytes` count tensors, `device_bytes` also
    workspaces, fragmentation and CUDA context."""

    phases: dict[str, dict[str, int]]
    peak_bytes: int
    deciding_phase: str
    components: dict[str, int]
    """In the deciding phase, including what is not tensors; their sum is `device_bytes`."""
    device_bytes: int
    """Bytes of the capacity in use at the peak, with the part of the CUDA context that exceeds the profile's
    reserve."""
    reserved_context_bytes: int = 0
    """The CUDA context in the profile's reserve; the driver reports it beside `device_bytes`."""


@dataclass(frozen=True)
class CostModel:
    """The predicted micro-batch cost, which never falls as rows or length grow."""

    static_bytes: int
    sizes: tuple[BytesPolynomial, ...]
    """Live bytes at each moment of a step that may be the peak; the largest counts."""
    chunk_tokens: int
    layout: ParallelLayout
    image_patches: int = 0
    """Patches of the largest image; 0 for text alone."""
    row_targets: int | None = None
    """See `Predictor`."""

    def bytes(self, rows: int, length: int, patches: int | None = None) -> int:
        """Bytes above `static_bytes` at the peak of a micro-batch of `rows` sequences padded to `length` tokens.
        `patches`: those of all images; None: each sequence has the largest."""
        patches = rows * self.image_patches if patches is None else patches
        targets = most_targets(rows, length, self.row_targets, self.layout)
        shape = shape_of(rows, self.layout.positions(length), self.chunk_tokens, targets, patches)
        return highest_value(self.sizes, shape)


def most_targets(rows: int, length: int, row_targets: int | None, layout: ParallelLayout) -> int | None:
    """Most target tokens that a rank has of `rows` sequences of `length` tokens, of which none has more than
    `row_targets`, and none begins with one. None: nothing is known of them, so that all tokens count."""
    if row_targets is None:
        return None
    return rows * min(layout.positions(length), length - 1, row_targets)


def cost_model(arch: Architecture, spec: RunSpec, row_targets: int | None = None) -> CostModel:
    """The cost model of a run; evaluating it is cheap enough for every candidate micro-batch of every step. If a
    step has several micro-batches, the cost is that of a later one, when gradients of earlier ones exist.
    `row_targets`: as in `Predictor`."""
    layout = layout_of(spec.profile)
    several = batch_of_a_rank(spec, layout) > 1
    return replace(_cost_model(arch, memory_config_of(arch, spec), several, layout), row_targets=row_targets)


def batch_of_a_rank(spec: RunSpec, layout: ParallelLayout) -> int:
    """Sequences per optimizer step of one rank, or of one group of ranks that share sequences."""
    samples = -(-spec.recipe.train.batch_size // layout.sequence_groups)
    return samples * spec.recipe.sequences_per_sample


def in_whole_samples(recipe: Recipe, sequences: int) -> int:
    """How many of the longest sequences a micro-batch holds that has memory for `sequences` of them: both sides of each
    pair, or one alone where two do not fit."""
    return sequences if sequences < 2 else sequences - sequences % recipe.sequences_per_sample


@lru_cache(maxsize=256)
def _cost_model(arch: Architecture, config: MemoryConfig, accumulating: bool, layout: ParallelLayout) -> CostModel:
    total = static_of_a_rank(arch, config, layout)
    scratch_bytes = optimizer_scratch(arch, config) + update_scratch(arch, config, total.widened)
    end = PhaseCost(total.gradients, NO_BYTES, (scratch_bytes * BYTE,), "optimizer", NO_BYTES)
    # With `one_row` the cost may be higher, and the cost model must hold for any number of rows.
    phases = step_cost(arch, for_rows(arch, config, 1), accumulating, layout).values()
    sizes = highest([size for cost in (end, *sum(phases, ())) for size in cost.sizes()])
    static = total.static + bucket_bytes(arch, config, layout)
    return CostModel(static, sizes, config.chunk_tokens, layout, config.image_patches)


def predict(arch: Architecture, spec: RunSpec, *, rows: int, length: int) -> Prediction:
    """Predict all phases for a micro-batch of `rows` sequences padded to `length` tokens."""
    return Predictor(arch, spec).predict(rows, length)


class Predictor:
    """Predicts the memory of micro-batches of one run, by the memory formula of its model's family. `row_targets`: most
    target tokens of one sequence of the data; None: unknown, every token counts as one."""

    def __init__(self, arch: Architecture, spec: RunSpec, row_targets: int | None = None) -> None:
        self.row_targets = row_targets
        self.arch, self.recipe, self.layout = arch, spec.recipe, layout_of(spec.profile)
        self.config = memory_config_of(arch, spec)
        self.batch = batch_of_a_rank(spec, self.layout)
        self.capacity_bytes = spec.profile.device.capacity_bytes
        self.profile = spec.profile
        self.total = static_of_a_rank(arch, self.config, self.layout)
        self._non_torch = non_torch_memory(spec)
        self._bucket_bytes = bucket_bytes(arch, self.config, self.layout)

    def recomputing(self, layers: int) -> Predictor:
        """The predictor of the same run in which so many layers recompute their activations."""
        changed, kept = copy(self), max(0, self.arch.layers - layers)
        changed.config = replace(self.config, checkpointing=layers > 0, kept_layers=kept if layers else 0)
        return changed

    def host(self, rows: int, length: int) -> dict[str, int]:
        """Bytes that offloads take on the host of one machine, by what is offloaded."""
        return host_bytes(self.arch, self.config, self.profile, rows, length)

    def host_fits(self, rows: int, length: int) -> bool:
        """Whether the host's memory holds what is offloaded; True if nothing is."""
        found = self.host(rows, length)
        return not found or sum(found.values()) <= host_capacity_bytes(self.profile)

    def fits(self, rows: int, length: int) -> bool:
        """Whether the predicted peak is within the device's capacity."""
        return self.predict(rows, length).device_bytes <= self.capacity_bytes

    def predict(self, rows: int, length: int) -> Prediction:
        """Predict all phases for a micro-batch of `rows` × `length` tokens with as many targets as there may be."""
        return self.predict_shape(MicroBatchShape(rows, length))

    def predict_shape(self, micro_batch: MicroBatchShape) -> Prediction:
        rows, length, targets, accumulating, patches = micro_batch
        accumulating = rows < self.batch if accumulating is None else accumulating
        config = self._with_images_of(for_rows(self.arch, step_config(self.config), rows), rows, patches)
        patches = rows * config.image_patches if patches is None else patches
        targets = most_targets(rows, length, self.row_targets, self.layout) if targets is None else targets
        shape = shape_of(rows, self.layout.positions(length), self.config.chunk_tokens, targets, patches)
        phases = {"load": {"weights": self.total.weights, "adapters": self.total.adapters}}
        for name, costs in step_cost(self.arch, config, accumulating, self.layout).items():
            phases[name] = self._row(costliest(costs, shape).components(shape))
        phases["optimizer_step"] = self._row(self._update())
        if evaluates(self.recipe):
            phases["evaluate"] = self._row(self._evaluation(config, rows, length))
        if generates(self.recipe):
            phases["generate"] = self._row(self._generation(length))
        sums = {phase: sum(parts.values()) for phase, parts in phases.items()}
        deciding = max(sums, key=sums.__getitem__)
        components = dict.fromkeys(COMPONENTS, 0) | phases[deciding] | self._non_torch.components(sums[deciding])
        used_bytes, reserved = sum(components.values()), self._non_torch.reserved_context_bytes
        return Prediction(phases, sums[deciding], deciding, components, used_bytes, reserved)

    def _with_images_of(self, config: MemoryConfig, rows: int, patches: int | None) -> MemoryConfig:
        """The config for images of the average size, if the encoder takes any size."""
        if not patches or self.arch.vision_encoder is None or self.arch.vision_encoder.patches is not None:
            return config
        return replace(config, image_patches=-(-patches // rows))

    def _row(self, parts: dict[str, int]) -> dict[str, int]:
        """Bytes by component of one phase: the static bytes plus `parts`, in the order of COMPONENTS."""
        total = self.total
        row = {"weights": total.weights, "adapters": total.adapters}
        if "gradients" in parts:
            row["gradients"] = parts["gradients"]
        row["optimizer"] = total.optimizer + parts.get("optimizer", 0)
        row |= {name: parts[name] for name in ("activations", "recompute", "loss") if name in parts}
        if self._bucket_bytes or "buffers" in parts:
            row["buffers"] = parts.get("buffers", 0) + self._bucket_bytes
        return row

    def _update(self) -> dict[str, int]:
        parts = {"gradients": self.total.gradients, "optimizer": optimizer_scratch(self.arch, self.config)}
        scratch_bytes = update_scratch(self.arch, self.config, self.total.widened)
        return parts | ({"buffers": scratch_bytes} if scratch_bytes else {})

    def _evaluation(self, config: MemoryConfig, rows: int, length: int) -> dict[str, int]:
        """Bytes of evaluation above the static bytes, on rank 0."""
        rows = self._rows_alone(rows, length)
        targets = most_targets(rows, length, self.row_targets, SINGLE_DEVICE)
        shape = shape_of(rows, length, self.config.chunk_tokens, targets, rows * config.image_patches)
        spread = shards(self.arch, self.config, self.layout)
        size = highest_value(evaluation(self.arch, config), shape)
        return {"activations": size, "buffers": spread.evaluate() if spread else 0}

    def _rows_alone(self, rows: int, length: int) -> int:
        """The number of sequences that rank 0 evaluates at once, if training has micro-batches of `rows`. With
        sequence parallelism, which evaluation has not: as many as cost no more than its part of a training
        micro-batch."""
        sequence = self.layout.sequence
        if sequence == 1:
            return rows
        shared = replace(_cost_model(self.arch, self.config, self.batch > 1, self.layout), row_targets=self.row_targets)
        alone_config = replace(self.config, sequence=1)
        alone = _cost_model(self.arch, alone_config, self.recipe.sequences_per_step > 1, SINGLE_DEVICE)
        most_bytes = shared.bytes(rows, length)
        fitting = (fewer for fewer in range(rows // sequence + 1, 1, -1) if alone.bytes(fewer, length) <= most_bytes)
        return next(fitting, 1)

    def _generation(self, length: int) -> dict[str, int]:
        rows, generate = self.generation_rows(length), self.recipe.generate
        spread = shards(self.arch, self.config, self.layout)
        size = generation_bytes(self.arch, self.config, rows=rows, prompt=length, generate=generate)
        return {"activations": size, "buffers": spread.generate() if spread else 0}

    def generation_rows(self, length: int) -> int:
        """How many answers are generated at once: as many as asked for, halved until they fit into the capacity."""
        spread = shards(self.arch, self.config, self.layout)
        around_bytes = self.total.static + self._bucket_bytes + (spread.generate() if spread else 0)
        room_bytes = self._non_torch.room_bytes(self.capacity_bytes) - around_bytes
        return generation_rows(self.arch, self.config, self.recipe, length=length, room_bytes=room_bytes)
