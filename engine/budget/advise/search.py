"""Searches for changes that make a run fit, cheapest first; for a run that fits, for uses of its unused memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, product
from typing import Any

from engine.architecture.lookup import ModelFacts, find_facts
from engine.budget.advise.levers import Lever, breaks_a_rule, is_refused, levers_of, room_levers
from engine.budget.advise.plan import Plan, make_plan
from engine.budget.predict.prediction import Predictor, in_whole_samples
from engine.config.changes import value_of, with_changes
from engine.config.files.caches import SequenceBounds, known_bounds
from engine.config.schema.run import RunSpec
from engine.errors import NotSimulatedError, UsageError
from engine.journal.event_text import speed_text

Levers = tuple[Lever, ...]

DOUBTFUL_KEYS = (
    ("train.optimizer", "train.state_dtype"), ("train.optimizer_offload",), ("train.activation_offload",),
    ("parallel.sequence",), ("parallel.strategy",), ("method.adapter_dtype",), ("model.quantize",),
)  # fmt: skip
"""Keys whose strongest lever may be refused beside others, or need more memory: tried with and without each."""
MOST_TRIED = 20_000
"""Partial sets that are examined at most."""


class Trial:
    """Whether a run fits with a set of levers, remembered for each set."""

    def __init__(self, spec: RunSpec, known: SequenceBounds | None, facts: ModelFacts) -> None:
        self._spec, self._arch = spec, facts.require_architecture()
        self._bounds = known
        self._known: dict[frozenset[Lever], bool] = {}

    def fits(self, chosen: Levers) -> bool:
        """Whether the rules allow these levers together, and one sequence then fits on device and host (or
        train.micro_batch sequences, if that is a number)."""
        key = frozenset(chosen)
        if key not in self._known:
            self._known[key] = self._fits(chosen)
        return self._known[key]

    def _fits(self, chosen: Levers) -> bool:
        spec = with_changes(self._spec, {key: value for lever in chosen for key, value in lever.changes})
        if breaks_a_rule(spec):
            return False
        longest, row_targets = self._bounds or SequenceBounds(spec.recipe.data.max_length)
        predictor, asked = Predictor(self._arch, spec, row_targets), spec.recipe.train.micro_batch
        length = min(longest, spec.recipe.data.max_length)
        most = predictor.batch if asked == "auto" else in_whole_samples(spec.recipe, min(asked, predictor.batch))
        rows = (most, 1) if asked == "auto" else (most,)
        return any(predictor.fits(each, length) and predictor.host_fits(each, length) for each in rows)


def fitting_sets(levers: Sequence[Lever], trial: Trial, offered: Callable[[Levers], bool]) -> Iterator[Levers]:
    """Sets with which the run fits and that are `offered`, in the order of cost, without supersets of earlier ones.

    A best-first search: a partial set decides for each lever, the most expensive first, whether it is included; the
    cheapest is extended next, at equal cost the one with fewer levers. It is dropped if the run does not fit even with
    the strongest of all undecided levers.
    """
    dearest_first = sorted(levers, key=lambda lever: -lever.cost)
    order, found = count(), list[frozenset[Lever]]()
    waiting: list[tuple[float, int, int, int, Levers]] = []
    if _can_fit((), dearest_first, trial):
        waiting.append((0.0, 0, next(order), 0, ()))
    for _ in range(MOST_TRIED):
        if not waiting:
            return
        cost, size, _, decided, chosen = heapq.heappop(waiting)
        if any(earlier <= set(chosen) for earlier in found):
            continue
        if decided == len(dearest_first):
            if chosen and trial.fits(chosen) and offered(chosen):
                found.append(frozenset(chosen))
                yield chosen
            continue
        lever, rest = dearest_first[decided], dearest_first[decided + 1 :]
        if _can_fit(chosen, rest, trial):
            heapq.heappush(waiting, (cost, size, next(order), decided + 1, chosen))
        if not any(lever.keys & other.keys for other in chosen):
            heapq.heappush(waiting, (cost + lever.cost, size + 1, next(order), decided + 1, (*chosen, lever)))


def _can_fit(chosen: Levers, undecided: Sequence[Lever], trial: Trial) -> bool:
    """Whether the run fits with the chosen levers plus, for each key, the undecided lever that saves most memory."""
    strongest: dict[frozenset[str], Lever] = {}
    for lever in sorted(undecided, key=lambda lever: lever.cost):
        if not any(lever.keys & other.keys for other in chosen):
            strongest[lever.keys] = lever
    options: list[list[Lever | None]] = [
        [*(lever for keys, lever in strongest.items() if keys & set(group)), None] for group in DOUBTFUL_KEYS
    ]
    sure = [lever for keys, lever in strongest.items() if not any(keys & set(group) for group in DOUBTFUL_KEYS)]
    return any(
        trial.fits((*chosen, *sure, *[lever for lever in picked if lever is not None])) for picked in product(*options)
    )


MAX_SUGGESTIONS = 5
SAME_TIME_PERCENT = 5.0
"""Suggestions whose estimated step times differ by at most this take about the same time."""


@dataclass(frozen=True)
class Suggestion:
    """Levers that together make a run fit (or use its unused memory), and the plan of the run with their changes."""

    levers: Levers
    changes: dict[str, tuple[Any, Any]]
    """By recipe or profile key: values (before, after)."""
    plan: Plan
    slower_percent: float
    """Percent by which a token takes longer than in the run as written; negative if it is faster. By the model of time
    as far as that knows the device and the changes, else a rough estimate."""
    tokens_per_second: float | None
    """By that; None where nothing is known of the device's speed."""

    @property
    def changes_learning(self) -> bool:
        """Whether the changes affect what the run learns, or the data it learns from."""
        return any(lever.changes_learning for lever in self.levers)

    @property
    def changes_arithmetic(self) -> bool:
        """Whether any change lowers the precision of numbers or changes how they are rounded."""
        return any(lever.changes_arithmetic for lever in self.levers)

    @property
    def summary(self) -> str:
        """One line: the speed, and whether arithmetic or learning changes."""
        speed, predicted = speed_text(self.slower_percent), self.tokens_per_second
        speed += f" ({predicted:,.0f} tokens/s)" if predicted else ""
        arithmetic = ", changes arithmetic" if self.changes_arithmetic else ""
        return speed + arithmetic + (", CHANGES THE TRAINING RESULT" if self.changes_learning else "")

    def as_json(self) -> dict[str, Any]:
        """An entry of what `tunedeck advise --json` prints."""
        return {
            "changes": {key: {"from": before, "to": after} for key, (before, after) in self.changes.items()},
            "peak_bytes": self.plan.peak_bytes,
            "margin_bytes": self.plan.margin_bytes,
            "host_bytes": self.plan.host_bytes,
            "micro_batch": self.plan.micro_batch,
            "slower_percent": self.slower_percent,
            "tokens_per_second": self.tokens_per_second,
            "changes_learning": self.changes_learning,
            "changes_arithmetic": self.changes_arithmetic,
            "notes": [lever.note for lever in self.levers],
        }


@dataclass(frozen=True)
class Advice:
    """`suggestions` make a run fit that does not; those in `room` use the unused memory of a run that fits."""

    plan: Plan
    suggestions: list[Suggestion]
    room: list[Suggestion]

    def as_json(self) -> dict[str, Any]:
        """As `tunedeck advise --json` prints it."""
        return {
            "plan": self.plan.as_json(),
            "suggestions": [suggestion.as_json() for suggestion in self.suggestions],
            "room": [suggestion.as_json() for suggestion in self.room],
        }


def advise(spec: RunSpec, *, known: SequenceBounds | None = None) -> Advice:
    """Plan a run and search for suggestions. `known`: as in `make_plan`, whose errors are raised."""
    known = known or known_bounds(spec.recipe)
    facts = find_facts(spec.recipe.model)
    plan = make_plan(spec, known=known, facts=facts)
    if fits(plan):
        return Advice(plan, [], list(_room(spec, plan, known, facts)))
    search = _suggestions if plan.predictor == "closed_form" else _simulated_suggestions
    fastest_first = sorted(search(spec, plan, known, facts), key=_rank)
    return Advice(plan, roomier_first(fastest_first), [])


def _rank(suggestion: Suggestion) -> tuple[int, float]:
    """Sorts suggestions: the fewest changes to the training result, then the least cost in speed and quality."""
    levers = suggestion.levers
    quality = sum(lever.quality for lever in levers)
    return sum(lever.changes_learning for lever in levers), suggestion.slower_percent + quality


def roomier_first(suggestions: Iterable[Suggestion]) -> list[Suggestion]:
    """Suggestions of which a tight one stands behind those that leave more, take about the same time and change no
    more of learning and arithmetic; otherwise in their order."""
    ranked: list[Suggestion] = []
    for suggestion in suggestions:
        place = len(ranked)
        while place and _is_roomier(suggestion, ranked[place - 1]):
            place -= 1
        ranked.insert(place, suggestion)
    return ranked


def _is_roomier(suggestion: Suggestion, other: Suggestion) -> bool:
    return (
        other.plan.is_tight
        and not suggestion.plan.is_tight
        and suggestion.slower_percent - other.slower_percent <= SAME_TIME_PERCENT
        and suggestion.changes_learning <= other.changes_learning
        and suggestion.changes_arithmetic <= other.changes_arithmetic
    )


def fits(plan: Plan) -> bool:
    return plan.verdict == "fits" and plan.host_fits


def possible_levers(spec: RunSpec, plan: Plan, facts: ModelFacts) -> list[Lever]:
    """The levers after which `train` would accept the run, either alone or together with the lever that turns full
    fine-tuning into LoRA."""
    levers = levers_of(spec, plan, facts)
    adapters = [lever for lever in levers if "method.kind" in lever.keys]
    return [
        lever
        for lever in levers
        if not is_refused(changed(spec, (lever,)), facts)
        or (lever not in adapters and adapters and not is_refused(changed(spec, (lever, *adapters)), facts))
    ]


def changed(spec: RunSpec, levers: Levers) -> RunSpec:
    """The copy is not checked."""
    return with_changes(spec, {key: value for lever in levers for key, value in lever.changes})


def _suggestions(spec: RunSpec, plan: Plan, known: SequenceBounds | None, facts: ModelFacts) -> Iterator[Suggestion]:
    """Yield suggestions that `train` would not refuse and with which the run fits, in order of cost, at most
    MAX_SUGGESTIONS. `known`: of the data; None: nothing."""

    def holds(levers: Levers) -> bool:
        return not is_refused(changed(spec, levers), facts) and fits(_suggestion(spec, plan, levers, known, facts).plan)

    found = fitting_sets(possible_levers(spec, plan, facts), Trial(spec, known, facts), holds)
    yield from (_suggestion(spec, plan, levers, known, facts) for levers in islice(found, MAX_SUGGESTIONS))


def _simulated_suggestions(
    spec: RunSpec, plan: Plan, known: SequenceBounds | None, facts: ModelFacts
) -> Iterator[Suggestion]:
    """Yield suggestions for a model family without a memory formula, at most MAX_SUGGESTIONS. Each set of levers must
    be simulated, which takes seconds; so only single levers are tried, and the set of all levers that change neither
    learning nor arithmetic."""
    levers = possible_levers(spec, plan, facts)
    free = tuple(lever for lever in levers if not lever.changes_learning and not lever.changes_arithmetic)
    sets: list[Levers] = [(lever,) for lever in levers] + ([free] if len(free) > 1 else [])
    found: list[frozenset[Lever]] = []
    for chosen in sorted(sets, key=lambda levers: (sum(lever.cost for lever in levers), len(levers))):
        overlaps = len({key for lever in chosen for key in lever.keys}) < sum(len(lever.keys) for lever in chosen)
        if overlaps or len(found) == MAX_SUGGESTIONS or any(earlier <= set(chosen) for earlier in found):
            continue
        suggestion = _simulated(spec, plan, chosen, known, facts)
        if suggestion is not None and fits(suggestion.plan):
            found.append(frozenset(chosen))
            yield suggestion


def _simulated(
    spec: RunSpec, plan: Plan, levers: Levers, known: SequenceBounds | None, facts: ModelFacts
) -> Suggestion | None:
    """The suggestion that applies `levers`; None if `train` would refuse the changed run. Some refusals are found only
    by the changed run's simulation: raises NotSimulatedError if it has not been run."""
    if is_refused(changed(spec, levers), facts):
        return None
    try:
        return _suggestion(spec, plan, levers, known, facts)
    except NotSimulatedError:
        raise
    except UsageError:
        return None


def _suggestion(
    spec: RunSpec, plan: Plan, levers: Levers, known: SequenceBounds | None, facts: ModelFacts
) -> Suggestion:
    """Apply `levers` to the run of `plan` and plan it anew; returns the suggestion, whether or not it fits. `known`: of
    the data; None: as in `make_plan`. Raises the errors of `make_plan`."""
    after = changed(spec, levers)
    if known:
        known = known._replace(tokens=min(known.tokens, after.recipe.data.max_length))
    in_order = sorted(levers, key=lambda lever: lever.cost)
    keys = [key for lever in in_order for key, _ in lever.changes]
    moved = {key: (value_of(spec, key), value_of(after, key)) for key in keys}
    planned = make_plan(after, known=known, facts=facts)
    slower = _slower_percent(plan, planned, levers)
    speed = plan.time.tokens_per_second / (1 + slower / 100) if plan.time else None
    return Suggestion(tuple(in_order), moved, planned, slower, speed)


def _slower_percent(before: Plan, after: Plan, levers: Levers) -> float:
    if before.time is None or after.time is None:
        return sum(lever.slower_percent for lever in levers)
    predicted = 100 * (before.time.tokens_per_second / after.time.tokens_per_second - 1)
    return round(predicted + sum(lever.slower_percent for lever in levers if not lever.timed), 1)


def _room(spec: RunSpec, plan: Plan, known: SequenceBounds | None, facts: ModelFacts) -> Iterator[Suggestion]:
    """Yield suggestions that use the unused memory of a run that fits: no gradient checkpointing, a larger micro-batch,
    longer sequences, or a higher rank. `known`: of the data; None: nothing."""
    for lever in room_levers(spec):
        if is_refused(changed(spec, (lever,)), facts):
            continue
        still_known = None if "data.max_length" in lever.keys else known
        suggestion = _simulated(spec, plan, (lever,), still_known, facts)
        if suggestion is not None and fits(suggestion.plan) and (lever.changes_learning or _differs(suggestion, plan)):
            yield suggestion


def _differs(suggestion: Suggestion, plan: Plan) -> bool:
    """Whether a change of speed alone runs otherwise than `plan`: "auto" may choose what is written already."""
    after = suggestion.plan
    return (after.micro_batch, after.checkpointing) != (plan.micro_batch, plan.checkpointing)
