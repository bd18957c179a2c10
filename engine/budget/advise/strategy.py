"""Decides `parallel.strategy = "auto"`: replicated weights where the model fits each device, else sharded weights.

Replicated ranks exchange gradients once a step. Sharded ranks exchange the weights of every layer in every micro-batch,
which is slower, but each holds only a part of them. `settle_parallel` also decides `parallel.sequence = "auto"`.

Try: `tunedeck plan -p 4xh100 -r full --set model.id=Qwen/Qwen2.5-7B`
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from engine.budget.advise.plan import Plan, Verdict, make_plan
from engine.budget.advise.sequence import Settled, recorded, settle_sequence
from engine.budget.advise.staged_plan import WORST, planning_specs
from engine.budget.predict.shards import SHARDS_SINCE, can_shard
from engine.errors import ConfigNotHereError, SpecError, UnknownArchitectureError
from engine.spec.check.parallel import device_count
from engine.spec.check.unsupported import refuse_unsupported
from engine.spec.schema.run import RunSpec

Choice = Literal["replicated", "sharded"]

IN_WORDS: dict[Verdict, str] = {
    "fits": "fits",
    "fits_smaller": "fits with a smaller micro-batch or remedies",
    "does_not_fit": "does not fit",
}


class _Chosen(NamedTuple):
    """A strategy, the run spec with it and notices (`settled`), and the reason for the choice. The reason contains no
    commas, because commas separate the entries of `provenance.parallel`."""

    strategy: Choice
    settled: Settled
    reason: str


def settle_parallel(spec: RunSpec) -> Settled:
    """Decide `parallel.strategy` and `parallel.sequence` where they are "auto"; any other run spec is returned
    unchanged.

    Weights are replicated if the run then fits without changes, if it fits in both ways and sharding brings no better
    verdict, or if it uses a feature that needs whole weights. Else they are sharded, also for a model whose memory
    cannot be predicted, because that needs less memory. Raises UsageError where `parallel.sequence` cannot be decided.
    """
    if device_count(spec.profile) == 1 or "auto" not in (spec.profile.parallel.strategy, spec.recipe.parallel.strategy):
        return settle_sequence(spec)
    chosen = _choose(spec)
    line = f'strategy = "{chosen.strategy}" ("auto": {chosen.reason})'
    notice = f'parallel.strategy = "auto": {chosen.strategy}; {chosen.reason}'
    return Settled(recorded(chosen.settled.spec, "strategy", line), [notice, *chosen.settled.notices])


def _choose(spec: RunSpec) -> _Chosen:
    replicated = settle_sequence(_with_strategy(spec, "replicated"))
    if obstacle := _obstacle_to_shards(spec):
        return _Chosen("replicated", replicated, obstacle)
    try:
        whole = _fit_of(replicated.spec)
        if whole == ("fits", True):
            return _Chosen("replicated", replicated, "the whole model fits each device")
        sharded = settle_sequence(_with_strategy(spec, "sharded"))
        parts = _fit_of(sharded.spec)
    except (ConfigNotHereError, UnknownArchitectureError):
        sharded = settle_sequence(_with_strategy(spec, "sharded"))
        return _Chosen("sharded", sharded, "no memory plan says that one device holds the whole model")
    reason = f"it {IN_WORDS[whole[0]]} if replicated; it {IN_WORDS[parts[0]]} if sharded"
    if _order(parts) < _order(whole) or whole[0] == "does_not_fit":
        return _Chosen("sharded", sharded, reason)
    return _Chosen("replicated", replicated, f"{reason}; replicated ranks exchange less")


def _with_strategy(spec: RunSpec, strategy: Choice) -> RunSpec:
    parallel = spec.profile.parallel.model_copy(update={"strategy": strategy})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"parallel": parallel})})


def _obstacle_to_shards(spec: RunSpec) -> str:
    """Why this run cannot shard its weights, as text for a notice: a feature that needs whole weights, or an old torch;
    empty if it can."""
    anyway = _refused(_with_strategy(spec, "replicated"))
    for problem in _refused(_with_strategy(spec, "sharded")):
        if problem not in anyway:
            return f"{problem.partition(':')[0].partition(' beside ')[0]} rules sharding out"
    return "" if can_shard() else f"sharded weights need torch {SHARDS_SINCE}"


def _refused(spec: RunSpec) -> list[str]:
    try:
        refuse_unsupported(spec)
    except SpecError as error:
        return error.problems
    return []


def _fit_of(spec: RunSpec) -> tuple[Verdict, bool]:
    """The worst verdict of a run's stages, and whether the host holds what every stage offloads."""
    plans: list[Plan] = [make_plan(part) for part in planning_specs(spec)]
    verdicts: list[Verdict] = [plan.verdict for plan in plans]
    return max(verdicts, key=WORST.__getitem__, default="fits"), all(plan.host_fits for plan in plans)


def _order(fit: tuple[Verdict, bool]) -> tuple[int, bool]:
    verdict, host_fits = fit
    return WORST[verdict], not host_fits
