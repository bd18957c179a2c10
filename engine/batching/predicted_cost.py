"""The predicted cost of micro-batches, and the budget that a run starts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.architecture.facts import from_config
from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import Cost
from engine.budget.advise.plan import Plan, make_plan
from engine.budget.predict.parallel_layout import layout_of, on_one_device
from engine.budget.predict.prediction import batch_of_a_rank, cost_model, in_whole_samples
from engine.budget.predict.simulated import simulated_predictor
from engine.config.changes import with_changes
from engine.config.files.caches import SequenceBounds
from engine.config.schema.run import RunSpec
from engine.data.images import ImageProcessor
from engine.data.tokens import TokenData
from engine.errors import EnvironmentProblem, NotSimulatedError, UnknownArchitectureError
from engine.launch.other_processes import with_simulations
from engine.model.config import model_config_dict
from engine.model.cudnn_attention import rounded


@dataclass(frozen=True)
class MicroBatchCost:
    cost: Cost
    plan: Plan | None
    """None for an architecture whose memory cannot be predicted."""
    budget: MicroBatchBudget
    recomputing: Callable[[int], Cost] | None
    """The cost if so many layers recompute their activations; None without a memory formula."""
    checkpointing: bool | int
    """`train.gradient_checkpointing`, with the plan's number for "auto"."""


def micro_batch_cost(spec: RunSpec, known: SequenceBounds) -> MicroBatchCost:
    """The micro-batch cost and starting budget of a run on data of which `known` is known.

    micro_batch = N starts at the cost of N such sequences, which is also the limit. "auto" starts at the largest
    micro-batch predicted to fit (one sequence for an unknown architecture) and may grow to the whole step.
    """
    config, longest = model_config_dict(spec), known.tokens
    cost: Cost
    plan: Plan | None
    asked = spec.recipe.train.gradient_checkpointing
    try:
        plan = with_simulations(lambda: make_plan(spec, known=known))
        checkpointing = plan.checkpointing if asked == "auto" else asked
        spec = with_changes(spec, {"train.gradient_checkpointing": checkpointing})
        cost, rows, expected_slope = _cost_of(spec, config, known.targets), plan.micro_batch, 1.0
    except (UnknownArchitectureError, EnvironmentProblem):  # a simulation may end without a result
        cost, plan, rows, expected_slope = generic_cost(config), None, 1, 0.0
        checkpointing = True if asked == "auto" else asked
    top = batch_of_a_rank(spec, layout_of(spec.profile))
    if spec.recipe.train.micro_batch != "auto":
        rows = top = in_whole_samples(spec.recipe, min(spec.recipe.train.micro_batch, top))
    rows = min(rows, top)
    budget = MicroBatchBudget(cost(rows, longest), cost(top, longest), expected_slope=expected_slope)
    return MicroBatchCost(cost, plan, budget, _cost_recomputing(spec, config, known.targets), checkpointing)


def _cost_recomputing(spec: RunSpec, config: dict[str, Any], row_targets: int | None) -> Callable[[int], Cost] | None:
    """The cost as a function of the number of layers that recompute; None without a memory formula."""
    try:
        arch = from_config(config)
    except UnknownArchitectureError:
        return None
    key = "train.gradient_checkpointing"
    return lambda layers: cost_model(arch, with_changes(spec, {key: layers}), row_targets).bytes


def with_largest_image(spec: RunSpec, data: TokenData, images: ImageProcessor | None) -> RunSpec:
    """Set data.image_max_pixels to the largest image in `data` and unset data.image_min_pixels, because plans assume
    such an image in every sequence. Several images of one sample count as one of their total size."""
    if images is None or images.takes != "patches" or data.patches is None:
        return spec
    sizes = {"image_min_pixels": None, "image_max_pixels": int(data.patches.max()) * images.patch_side**2}
    found = spec.recipe.data.model_copy(update=sizes)
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"data": found})})


def _cost_of(spec: RunSpec, config: dict[str, Any], row_targets: int | None = None) -> Cost:
    """The cost by the memory formula if the family has one, else from the stored simulation (`simulated_predictor`)."""
    try:
        return cost_model(from_config(config), spec, row_targets).bytes
    except UnknownArchitectureError as unknown:
        return simulated_predictor(spec, unknown, row_targets).cost_model.bytes


def cost_on_one_device(spec: RunSpec) -> Cost:
    """The cost of whole sequences with unsharded weights, as in evaluation."""
    config = model_config_dict(spec)
    try:
        return _cost_of(on_one_device(spec), config)
    except (UnknownArchitectureError, NotSimulatedError):  # no simulation for a score: it takes longer than most
        return generic_cost(config)


def generic_cost(config: dict[str, Any]) -> Cost:
    """Cost (rows, length) for an unknown transformer, in bytes of 16-bit activations: s·b·h·(34 + 5·a·s/h) per layer,
    for b rows of s tokens, hidden size h and a attention heads.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 1.
    """
    hidden = int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 1024)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or config.get("num_layers") or 24)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 16)

    def cost(rows: int, length: int, _patches: int | None = None) -> int:
        return rows * length * layers * (34 * hidden + 5 * heads * length)

    return cost


def cost_when_padded(cost: Cost, longest: int) -> Cost:
    """`cost` of rows that are padded for cuDNN's attention, none beyond the `longest` row of the data."""

    def padded(rows: int, length: int, patches: int | None = None, /) -> int:
        return cost(rows, rounded(length, longest), patches)

    return padded
