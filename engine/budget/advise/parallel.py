"""Decides how a run is spread over devices where the recipe says "auto": `parallel.strategy` and
`parallel.sequence`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from engine.architecture.support import refuse_sequence_parallel
from engine.budget.advise.plan import Plan, Verdict, make_plan
from engine.budget.advise.staged_plan import WORST, RunFacts, find_run_facts, planning_specs
from engine.budget.predict.prediction import Predictor
from engine.budget.predict.shards import SHARDS_SINCE, can_shard
from engine.config.check.hardware_rules import device_count
from engine.config.check.notes import refuse_unsupported
from engine.config.files.caches import SequenceBounds, known_bounds
from engine.config.schema.run import RunSpec
from engine.errors import ConfigNotHereError, SpecError, UnknownArchitectureError, UsageError


class Settled(NamedTuple):
    """A run spec whose `profile.parallel.sequence` is decided, and notices for the user."""

    spec: RunSpec
    notices: list[str]


def settle_sequence(spec: RunSpec, facts: RunFacts) -> Settled:
    """Decide `parallel.sequence` where the recipe says "auto"; any other run spec is returned unchanged.

    If the longest sequence does not fit with any number of devices, the largest possible number is chosen and a notice
    says so. Raises UsageError where memory cannot be predicted.
    """
    devices = device_count(spec.profile)
    if spec.recipe.parallel.sequence != "auto" or devices == 1:
        return Settled(spec, [])
    try:
        sizes = [size for size in range(1, devices + 1) if devices % size == 0 and _is_possible(spec, size, facts)]
        fitting = next((size for size in sizes if _longest_fits(with_sequence(spec, size), facts)), None)
    except (ConfigNotHereError, UnknownArchitectureError) as error:
        raise UsageError(
            f'parallel.sequence = "auto" needs a memory plan, and there is none: {error.found}',
            expected=f"a number of devices that share a sequence: a divisor of {devices}",
            fix=error.fix or f"--set parallel.sequence={devices}",
        ) from error
    chosen = with_sequence(spec, fitting or sizes[-1])
    line = f'sequence = {chosen.profile.parallel.sequence} (recipe: "auto")'
    return Settled(recorded(chosen, "sequence", line), [_notice(chosen, fits=fitting is not None)])


def with_sequence(spec: RunSpec, size: int) -> RunSpec:
    parallel = spec.profile.parallel.model_copy(update={"sequence": size})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"parallel": parallel})})


def _is_possible(spec: RunSpec, size: int, facts: RunFacts) -> bool:
    """Whether the model and the recipe allow that `size` devices share each sequence. Raises the error of a model
    without a config."""
    parts = planning_specs(with_sequence(spec, size))
    configs = [facts.of(part.recipe.model).require_config() for part in parts]
    try:
        for config, part in zip(configs, parts, strict=True):
            refuse_sequence_parallel(config, part)
    except UsageError:
        return False
    return True


def _longest_fits(spec: RunSpec, facts: RunFacts) -> bool:
    """Whether a micro-batch of one sequence of the longest length fits, in every stage."""
    for part in planning_specs(spec):
        length, row_targets = known_bounds(part.recipe) or SequenceBounds(part.recipe.data.max_length)
        predictor = Predictor(facts.of(part.recipe.model).require_architecture(), part, row_targets)
        if not predictor.fits(1, length):
            return False
    return True


def recorded(spec: RunSpec, key: str, line: str) -> RunSpec:
    """A copy with `line` as the entry on `key` in `provenance.parallel`, whose entries commas separate."""
    lines = {part.partition(" =")[0]: part for part in spec.provenance.parallel.split(", ") if part} | {key: line}
    provenance = spec.provenance.model_copy(update={"parallel": ", ".join(lines.values())})
    return spec.model_copy(update={"provenance": provenance})


def _notice(spec: RunSpec, *, fits: bool) -> str:
    size = spec.profile.parallel.sequence
    if not fits:
        return f'parallel.sequence = "auto": {size}, the maximum, but the longest sequence does not fit'
    shared = f"{size} devices share a sequence" if size > 1 else "each device processes whole sequences"
    return f'parallel.sequence = "auto": {shared}; the longest sequence fits'


Choice = Literal["replicated", "sharded"]

IN_WORDS: dict[Verdict, str] = {
    "fits": "fits",
    "fits_smaller": "fits with a smaller micro-batch or remedies",
    "does_not_fit": "does not fit",
}


class _Chosen(NamedTuple):
    """A strategy, the run spec with it, and the reason, an entry of `provenance.parallel`: without commas."""

    strategy: Choice
    settled: Settled
    reason: str


def settle_parallel(spec: RunSpec, facts: RunFacts | None = None) -> Settled:
    """Decide `parallel.strategy` and `parallel.sequence` where they are "auto"; any other run spec is returned
    unchanged. `facts`: what is known of the run's models, if that was found before.

    Weights are replicated if the run then fits without changes, if sharding brings no better verdict, or if a feature
    needs whole weights. Else they are sharded, also where memory cannot be predicted, because that needs less memory.
    Raises UsageError where `parallel.sequence` cannot be decided.
    """
    asked = (spec.profile.parallel.strategy, spec.recipe.parallel.strategy, spec.recipe.parallel.sequence)
    if device_count(spec.profile) == 1 or "auto" not in asked:
        return Settled(spec, [])
    facts = facts or find_run_facts(spec)
    if "auto" not in asked[:2]:
        return settle_sequence(spec, facts)
    chosen = _choose(spec, facts)
    line = f'strategy = "{chosen.strategy}" ("auto": {chosen.reason})'
    notice = f'parallel.strategy = "auto": {chosen.strategy}; {chosen.reason}'
    return Settled(recorded(chosen.settled.spec, "strategy", line), [notice, *chosen.settled.notices])


def _choose(spec: RunSpec, facts: RunFacts) -> _Chosen:
    replicated = settle_sequence(_with_strategy(spec, "replicated"), facts)
    if obstacle := _obstacle_to_shards(spec):
        return _Chosen("replicated", replicated, obstacle)
    try:
        whole = _fit_of(replicated.spec, facts)
        if whole == ("fits", True):
            return _Chosen("replicated", replicated, "the whole model fits each device")
        sharded = settle_sequence(_with_strategy(spec, "sharded"), facts)
        parts = _fit_of(sharded.spec, facts)
    except (ConfigNotHereError, UnknownArchitectureError):
        sharded = settle_sequence(_with_strategy(spec, "sharded"), facts)
        return _Chosen("sharded", sharded, "no memory plan shows that one device can hold the whole model")
    reason = f"it {IN_WORDS[whole[0]]} if replicated; it {IN_WORDS[parts[0]]} if sharded"
    if _order(parts) < _order(whole) or whole[0] == "does_not_fit":
        return _Chosen("sharded", sharded, reason)
    return _Chosen("replicated", replicated, f"{reason}; replicated ranks exchange less")


def _with_strategy(spec: RunSpec, strategy: Choice) -> RunSpec:
    parallel = spec.profile.parallel.model_copy(update={"strategy": strategy})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"parallel": parallel})})


def _obstacle_to_shards(spec: RunSpec) -> str:
    """Why this run cannot shard its weights (a feature that needs whole weights, an old torch); empty if it can."""
    anyway = _refused(_with_strategy(spec, "replicated"))
    for problem in _refused(_with_strategy(spec, "sharded")):
        if problem not in anyway:
            return f"{problem.partition(':')[0].partition(' with ')[0]} does not support sharding"
    return "" if can_shard() else f"sharded weights need torch {SHARDS_SINCE}"


def _refused(spec: RunSpec) -> list[str]:
    try:
        refuse_unsupported(spec)
    except SpecError as error:
        return error.problems
    return []


def _fit_of(spec: RunSpec, facts: RunFacts) -> tuple[Verdict, bool]:
    """The worst verdict of a run's stages, and whether the host holds what every stage offloads."""
    plans: list[Plan] = [make_plan(part, facts=facts.of(part.recipe.model)) for part in planning_specs(spec)]
    verdicts: list[Verdict] = [plan.verdict for plan in plans]
    return max(verdicts, key=WORST.__getitem__, default="fits"), all(plan.host_fits for plan in plans)


def _order(fit: tuple[Verdict, bool]) -> tuple[int, bool]:
    verdict, host_fits = fit
    return WORST[verdict], not host_fits
