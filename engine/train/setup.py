"""From a run spec to everything a step works on: data, model, loss, optimizer, budget. Built once, in this order.

Nothing here loops. Try: `tunedeck train -p demo -r demo`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.budget.architecture import Architecture, from_config
from engine.budget.plan import Plan, make_plan
from engine.budget.predict import cost_model
from engine.data.order import SampleOrder
from engine.data.prepare import PreparedData, prepare_data
from engine.data.tokenise import tokenizer_hash
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.errors import UsageError
from engine.model.config import model_config_dict
from engine.model.load import LoadedModel, load_model
from engine.model.loss import make_loss
from engine.model.tokenizer import load_tokenizer
from engine.spec.run import RunSpec
from engine.train.costbudget import CostBudget
from engine.train.journal import Journal
from engine.train.microbatch import Cost
from engine.train.optimizer import StepGuard, allocate_state, build_optimizer
from engine.train.run_state import Identity
from engine.train.scaler import LossScaler
from engine.train.schedule import Schedule
from engine.train.transaction import Backoff, Parts


@dataclass
class Bench:
    """All that a run is made of, ready for its first step."""

    spec: RunSpec
    parts: Parts
    prepared: PreparedData
    order: SampleOrder
    schedule: Schedule
    total_steps: int
    identity: Identity
    flops_per_token: float


def set_up(spec: RunSpec, device: Device, journal: Journal, report: Callable[[Backoff], None]) -> Bench:
    """Prepare data, load the model, allocate optimizer state. Every phase is told to the journal.

    Raises:
        DataError, UsageError, EnvironmentProblem, DoesNotFitError: from the rooms that do the work.
    """
    recipe = spec.recipe
    journal.phase("tokenising")
    tokenizer = load_tokenizer(recipe.model, trust_remote_code=spec.limits.trust_remote_code)
    with device.host_region():
        prepared = prepare_data(spec, tokenizer, say=lambda text: journal.phase("tokenising", text))
    order, total_steps = make_order(prepared.train, spec)
    journal.phase("loading model", recipe.model.id)
    loaded = load_model(spec, device, tokenizer)
    for notice in loaded.notices:
        journal.warn("model", notice)
    loss = make_loss(
        loaded,
        implementation=recipe.train.loss,
        label_smoothing=recipe.train.label_smoothing,
        chunk_tokens=None,
        device=device,
    )
    optimizer = build_optimizer(recipe.train, loaded.trainable())
    allocate_state(optimizer)
    cost, budget = starting_budget(spec, prepared.train, journal)
    parts = Parts(
        device=device,
        loaded=loaded,
        loss=loss,
        optimizer=optimizer,
        guard=StepGuard(optimizer, loaded.trainable(), device),
        scaler=LossScaler.start(loaded.needs_loss_scaling),
        data=prepared.train,
        cost=cost,
        budget=budget,
        ladder=list(recipe.backoff.ladder),
        pad_id=int(tokenizer.pad_token_id),
        seed=recipe.train.seed,
        max_grad_norm=recipe.train.max_grad_norm,
        may_grow=recipe.backoff.grow and device.kind != "cpu",
        measures=device.kind != "cpu",
        report=report,
    )
    device.release_cached()
    parts.static_bytes = device.memory().allocated_bytes
    return Bench(
        spec=spec,
        parts=parts,
        prepared=prepared,
        order=order,
        schedule=Schedule.of(recipe.train, total_steps),
        total_steps=total_steps,
        identity=Identity(prepared.fingerprint, tokenizer_hash(tokenizer), recipe.train.seed),
        flops_per_token=flops_per_token(loaded),
    )


def make_order(data: TokenData, spec: RunSpec) -> tuple[SampleOrder, int]:
    """The order of the kept samples, and the number of optimizer steps. One epoch when the recipe names no end."""
    train = spec.recipe.train
    epochs = train.epochs if train.epochs or train.max_steps else 1.0
    order = SampleOrder(
        data.weights,
        seed=train.seed,
        shuffle=spec.recipe.data.shuffle,
        batch_size=train.batch_size,
        epochs=epochs,
    )
    return order, order.steps(epochs, train.max_steps)


def starting_budget(spec: RunSpec, data: TokenData, journal: Journal) -> tuple[Cost, CostBudget]:
    """How micro-batches are priced, and how dear the first may be; the plan goes into the journal.

    micro_batch = N starts at N sequences of the longest kept length, as written, and never grows above that. auto
    starts where the prediction says that it fits and may grow up to the whole step at once.
    """
    longest, train = int(data.lengths.max()), spec.recipe.train
    if known_architecture(spec) is None:
        journal.warn(
            "unknown_architecture",
            "memory cannot be predicted for this architecture; micro-batches start small and the budget is learned",
            'set train.micro_batch to a number you know to fit, or leave "auto"',
        )
    else:
        _tell_plan(make_plan(spec, longest=longest), journal)
    cost, rows = starting_costs(spec, longest)
    expected = 0.0 if known_architecture(spec) is None else 1.0
    top = train.batch_size
    if train.micro_batch != "auto":
        rows = top = min(train.micro_batch, train.batch_size)
    return cost, CostBudget(cost(rows, longest), top_bytes=cost(top, longest), expected_slope=expected)


def starting_costs(spec: RunSpec, longest: int) -> tuple[Cost, int]:
    """The price of a micro-batch, and how many sequences of `longest` tokens to start with (1 when in the dark)."""
    architecture = known_architecture(spec)
    if architecture is None:
        return generic_cost(model_config_dict(spec)), 1
    return cost_model(architecture, spec).bytes, make_plan(spec, longest=longest).micro_batch


def known_architecture(spec: RunSpec) -> Architecture | None:
    """What the budget knows of the model; None for architectures it has no closed form for."""
    try:
        return from_config(model_config_dict(spec))
    except UsageError:
        return None


def generic_cost(config: dict[str, Any]) -> Cost:
    """Activations of a transformer nobody described: s·b·h·(34 + 5·a·s/h) per layer in 16 bits (Korthikanti et al.
    2022, "Reducing Activation Recomputation in Large Transformer Models", equation 1). Orders micro-batches; the scale
    is learned."""
    hidden = int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 1024)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or config.get("num_layers") or 24)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 16)
    return lambda rows, length: rows * length * layers * (34 * hidden + 5 * heads * length)


def flops_per_token(loaded: LoadedModel) -> float:
    """Model FLOPs to train one token: 2 per weight forward and 2 for the input's gradient, over all matrices, and 2 for
    the weight's own gradient where it learns. Recomputation does not count (PaLM, appendix B, on MFU)."""
    matrices = [(p.numel(), p.requires_grad) for p in loaded.model.parameters() if p.dim() >= 2]
    return float(sum(4 * count + 2 * count * learns for count, learns in matrices))


def _tell_plan(plan: Plan, journal: Journal) -> None:
    told = plan.as_json()
    journal.write(
        "plan",
        predicted={"peak_bytes": told["peak_bytes"], "components": told["components"]},
        verdict=told["verdict"],
        capacity_bytes=told["capacity_bytes"],
        deciding_phase=told["deciding_phase"],
        micro_batch=told["micro_batch"],
        accumulation=told["accumulation"],
        tokens_per_micro_batch=told["tokens_per_micro_batch"],
    )
