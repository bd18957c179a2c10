"""How micro-batches are priced, and where a run starts: the budget's prediction turned into a cost function and a
first budget.

Where the budget knows the architecture, prices are its predicted bytes; elsewhere they are a published rule of thumb
that only orders micro-batches, and the scale is learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.batching.budget import CostBudget
from engine.batching.micro_batches import Cost
from engine.budget.architecture import from_config
from engine.budget.plan import Plan, make_plan
from engine.budget.predict import batch_of_a_rank, cost_model
from engine.budget.sharing import on_one_device, sharing_of
from engine.errors import UnknownArchitectureError
from engine.model.config import model_config_dict
from engine.spec.schema.run import RunSpec


@dataclass(frozen=True)
class Pricing:
    """A cost function, the plan behind it, and the budget to start with."""

    cost: Cost
    plan: Plan | None
    """None for an architecture that the budget has no closed form for."""
    budget: CostBudget


def price(spec: RunSpec, longest: int) -> Pricing:
    """Price the micro-batches of a run whose longest sequence has `longest` tokens.

    micro_batch = N starts at N sequences of that length, as written, and never grows above them. auto starts where the
    prediction says that it fits, or at one sequence when in the dark, and may grow up to the whole step at once.
    """
    config = model_config_dict(spec)
    try:
        cost, plan = cost_model(from_config(config), spec).bytes, make_plan(spec, longest=longest)
        rows, expected_slope = plan.micro_batch, 1.0
    except UnknownArchitectureError:
        cost, plan, rows, expected_slope = generic_cost(config), None, 1, 0.0
    top = batch_of_a_rank(spec, sharing_of(spec.profile))
    if spec.recipe.train.micro_batch != "auto":
        rows = top = min(spec.recipe.train.micro_batch, top)
    rows = min(rows, top)
    return Pricing(cost, plan, CostBudget(cost(rows, longest), cost(top, longest), expected_slope=expected_slope))


def cost_alone(spec: RunSpec) -> Cost:
    """What one process pays for whole sequences: the cost that evaluation goes by."""
    config = model_config_dict(spec)
    try:
        return cost_model(from_config(config), on_one_device(spec)).bytes
    except UnknownArchitectureError:
        return generic_cost(config)


def with_remedies(spec: RunSpec, plan: Plan) -> RunSpec:
    """The spec as a tight plan starts it: smaller micro-batches, recomputation, chunked loss; learning is unchanged."""
    changes = {key.removeprefix("train."): value for key, value in plan.remedies.items()}
    train = spec.recipe.train.model_copy(update=changes)
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"train": train})})


def generic_cost(config: dict[str, Any]) -> Cost:
    """Activations of a transformer nobody described: s·b·h·(34 + 5·a·s/h) per layer in 16 bits.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 1.
    """
    hidden = int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 1024)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or config.get("num_layers") or 24)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 16)
    return lambda rows, length: rows * length * layers * (34 * hidden + 5 * heads * length)
