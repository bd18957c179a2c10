"""Derives the micro-batch cost and the budget that a run starts with from the memory prediction.

If the memory prediction knows the architecture, a micro-batch's cost is its predicted bytes. For other architectures
the cost is a published rule of thumb that only orders micro-batches, and their real memory use is learned.

Try: `pytest tests/batching/test_micro_batches.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import Cost
from engine.budget.advise.plan import Plan, make_plan
from engine.budget.architecture.facts import from_config
from engine.budget.predict.parallel_layout import layout_of, on_one_device
from engine.budget.predict.prediction import batch_of_a_rank, cost_model
from engine.budget.predict.simulated import simulated_predictor
from engine.data.images import ImageProcessor
from engine.data.tokens import TokenData
from engine.errors import EnvironmentProblem, NotSimulatedError, UnknownArchitectureError
from engine.launch.simulation import with_simulations
from engine.model.config import model_config_dict
from engine.spec.schema.run import RunSpec


@dataclass(frozen=True)
class MicroBatchCost:
    """The cost function of a run's micro-batches, the plan behind it, and the budget to start with."""

    cost: Cost
    plan: Plan | None
    """None for an architecture whose memory cannot be predicted."""
    budget: MicroBatchBudget


def micro_batch_cost(spec: RunSpec, longest: int) -> MicroBatchCost:
    """The micro-batch cost and starting budget of a run whose longest sequence has `longest` tokens.

    With micro_batch = N the budget starts at the cost of N such sequences and never grows above it. With "auto" it
    starts at the largest micro-batch predicted to fit (one sequence for an unknown architecture), and may grow until
    the whole step is one micro-batch.
    """
    config = model_config_dict(spec)
    cost: Cost
    plan: Plan | None
    try:
        cost, plan = with_simulations(lambda: _planned_cost(spec, config, longest))
        rows, expected_slope = plan.micro_batch, 1.0
    except (UnknownArchitectureError, EnvironmentProblem):  # a simulation may end without a result
        cost, plan, rows, expected_slope = generic_cost(config), None, 1, 0.0
    top = batch_of_a_rank(spec, layout_of(spec.profile))
    if spec.recipe.train.micro_batch != "auto":
        rows = top = min(spec.recipe.train.micro_batch, top)
    rows = min(rows, top)
    budget = MicroBatchBudget(cost(rows, longest), cost(top, longest), expected_slope=expected_slope)
    return MicroBatchCost(cost, plan, budget)


def with_largest_image(spec: RunSpec, data: TokenData, images: ImageProcessor | None) -> RunSpec:
    """Set data.image_max_pixels to the size in pixels of the largest image in `data` and unset data.image_min_pixels,
    because plans assume an image of that size in every sequence; returns the changed run spec. Several images of one
    sample count as one image of their total size."""
    if images is None or images.takes != "patches" or data.patches is None:
        return spec
    sizes = {"image_min_pixels": None, "image_max_pixels": int(data.patches.max()) * images.patch_side**2}
    found = spec.recipe.data.model_copy(update=sizes)
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"data": found})})


def _planned_cost(spec: RunSpec, config: dict[str, Any], longest: int) -> tuple[Cost, Plan]:
    return _cost_of(spec, config), make_plan(spec, longest=longest)


def _cost_of(spec: RunSpec, config: dict[str, Any]) -> Cost:
    """The predicted micro-batch cost of the model with this config: by closed form if its family has one, else from the
    stored simulation. Raises the errors of `simulated_predictor`."""
    try:
        return cost_model(from_config(config), spec).bytes
    except UnknownArchitectureError as unknown:
        return simulated_predictor(spec, unknown).cost_model.bytes


def cost_on_one_device(spec: RunSpec) -> Cost:
    """The micro-batch cost for a process that computes whole sequences with unsharded weights, as in evaluation."""
    config = model_config_dict(spec)
    try:
        return _cost_of(on_one_device(spec), config)
    except (UnknownArchitectureError, NotSimulatedError):  # no simulation for a score: it takes longer than most
        return generic_cost(config)


def generic_cost(config: dict[str, Any]) -> Cost:
    """The cost function (rows, length) of a transformer of unknown architecture, in estimated bytes of 16-bit
    activations: s·b·h·(34 + 5·a·s/h) per layer, for b rows of s tokens, hidden size h and a attention heads.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 1.
    """
    hidden = int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 1024)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or config.get("num_layers") or 24)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 16)

    def cost(rows: int, length: int, _patches: int | None = None) -> int:
        return rows * length * layers * (34 * hidden + 5 * heads * length)

    return cost
