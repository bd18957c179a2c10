"""Names changes of keys that lower the peak of a plan; a plan shows them beside the phase with the peak.

Each change has been checked by the rules that `train` applies, and planned: with it, the same micro-batch needs less
memory. `engine.budget.advise.fit` searches for sets of changes that make a run fit.

Try: `tunedeck plan -p 24gb -r full`
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from engine.budget.advise.changes import Changes, is_refused, with_changes
from engine.budget.advise.plan import Plan, find_predictor
from engine.errors import NotSimulatedError, UsageError
from engine.spec.schema.run import RunSpec

MOST_NAMED = 2
"""The largest number of changes that are named."""
LAST_RESORT = "a smaller model.id, or a device with more memory"
SIMULATE_CHANGES = "tunedeck fit with the same arguments simulates changes, each of which takes some seconds"
"""Stands for the changes of a run whose step is simulated, if this machine keeps no simulation of a changed run."""


class _Offer(NamedTuple):
    """A change of keys that may lower the peak, and its text for the user. `rows`: sequences of a micro-batch with the
    change; None: as many as in the plan."""

    text: str
    changes: Changes
    rows: int | None = None


def lever_of(plan: Plan, spec: RunSpec) -> str:
    """Text for the user that names up to MOST_NAMED changes. All of them lower one component of the peak: the largest
    for which a change is known. If there is none, the text is LAST_RESORT, or SIMULATE_CHANGES for a simulated plan.

    Weights are tried first if they alone exceed capacity, or if adapters or buffers are the largest other component;
    else last.
    """
    for component in _components(plan):
        offers = (offer for offer in _offers(component, plan, spec) if _lowers(offer, plan, spec))
        if named := [offer.text for offer in islice(offers, MOST_NAMED)]:
            return ", or ".join(named)
    return LAST_RESORT if plan.predictor == "closed_form" else SIMULATE_CHANGES


def _components(plan: Plan) -> list[str]:
    """The names of the components of the peak that changes may lower, in the order to try them."""
    row = plan.prediction.phases[plan.prediction.deciding_phase]
    if plan.prediction.deciding_phase == "generate":
        return ["answers", "weights"]
    largest_first = sorted((name for name in row if name != "weights"), key=lambda name: -row[name])
    if row["weights"] > plan.capacity_bytes or largest_first[:1] in ([], ["adapters"], ["buffers"]):
        return ["weights", *largest_first]
    return [*largest_first, "weights"]


def _offers(component: str, plan: Plan, spec: RunSpec) -> Iterator[_Offer]:
    """Yield the changes that may lower `component`, the cheapest first; whether they do is not checked here."""
    if component == "answers":
        yield from _of_answers(spec)
    elif component == "weights":
        yield _Offer('model.quantize = "nf4" (changes arithmetic)', {"model.quantize": "nf4"})
        yield _Offer('parallel.strategy = "sharded"', {"parallel.strategy": "sharded", "parallel.shard": "parameters"})
        yield _Offer('parallel.shard = "parameters"', {"parallel.shard": "parameters"})
    elif component == "optimizer":
        yield _Offer('train.optimizer = "adamw_8bit" (changes arithmetic)', {"train.optimizer": "adamw_8bit"})
        yield _Offer("train.optimizer_offload = true", {"train.optimizer_offload": True})
        yield from _of_trained(spec)
    elif component in ("gradients", "adapters"):
        yield from _of_trained(spec)
    elif component in ("activations", "recompute", "loss"):
        yield from _of_activations(plan, spec, component)


def _of_answers(spec: RunSpec) -> Iterator[_Offer]:
    if "exact_match" not in spec.recipe.eval.metrics:
        yield _Offer("eval.samples = 0", {"eval.samples": 0})
    else:
        rest = [metric for metric in spec.recipe.eval.metrics if metric != "exact_match"] or ["loss"]
        yield _Offer("eval.samples = 0 without exact_match", {"eval.samples": 0, "eval.metrics": rest})
    fewer = max(1, spec.recipe.generate.max_new_tokens // 2)
    yield _Offer("a lower generate.max_new_tokens", {"generate.max_new_tokens": fewer})


def _of_trained(spec: RunSpec) -> Iterator[_Offer]:
    method = spec.recipe.method
    if method.kind == "full":
        yield _Offer('method.kind = "lora"', {"method.kind": "lora", "method.train_only": [], "method.freeze": []})
    elif method.rank > 1:
        yield _Offer("a lower method.rank", {"method.rank": method.rank // 2})


def _of_activations(plan: Plan, spec: RunSpec, component: str) -> Iterator[_Offer]:
    train = spec.recipe.train
    if component == "loss" and train.loss == "plain":
        yield _Offer('train.loss = "auto"', {"train.loss": "auto"})
    if not train.gradient_checkpointing:
        yield _Offer("train.gradient_checkpointing = true", {"train.gradient_checkpointing": True})
        return
    if plan.micro_batch > 1:
        yield _Offer(f"train.micro_batch below {plan.micro_batch}", {}, rows=plan.micro_batch // 2)
        return
    if (sequence := 2 * spec.profile.parallel.sequence) <= plan.ranks:
        yield _Offer(f"parallel.sequence = {sequence}", {"parallel.sequence": sequence})
    yield _Offer(f"data.max_length below {plan.length}", {"data.max_length": max(1, plan.length // 2)})


def _lowers(offer: _Offer, plan: Plan, spec: RunSpec) -> bool:
    """Whether an offer is worth showing: it changes something, `train` would accept the changed run, and that run has a
    lower predicted peak with the offer's micro-batch (else the plan's) and offloads that fit on the host. A change that
    would have to be simulated first is not."""
    changed = with_changes(spec, offer.changes)
    if (offer.changes and changed == spec) or is_refused(changed):
        return False
    try:
        predictor = find_predictor(changed)
    except (NotSimulatedError, UsageError):  # not simulated yet, or its simulation refused it
        return False
    rows, length = offer.rows or plan.micro_batch, min(plan.length, changed.recipe.data.max_length)
    found = predictor.predict(rows, length)
    return found.device_bytes < plan.prediction.device_bytes and predictor.host_fits(rows, length)
