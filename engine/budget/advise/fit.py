"""Searches for changes that make a run fit, cheapest first; for a run that fits, for uses of its unused memory.

Every suggestion has been checked by the rules of `recipes check` and `train`, and planned: with it the run fits on the
device, and its offloads fit on the host. A suggestion consists of levers: single changes of keys, each with a cost
(`engine.budget.advise.levers`).

Try: `tunedeck fit -p 24gb -r full --set model.id=Qwen/Qwen2.5-7B`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from engine.budget.advise.changes import is_refused, value_of, with_changes
from engine.budget.advise.levers import Lever, levers_of, room_levers
from engine.budget.advise.plan import Plan, make_plan
from engine.budget.advise.search import Levers, Trial, fitting_sets
from engine.errors import NotSimulatedError, UsageError
from engine.spec.files.known_lengths import known_longest
from engine.spec.schema.run import RunSpec

MAX_SUGGESTIONS = 5


@dataclass(frozen=True)
class Suggestion:
    """Levers that together make a run fit (or use its unused memory), and the plan of the run with their changes."""

    levers: Levers
    changes: dict[str, tuple[Any, Any]]
    """Maps each changed recipe or profile key to its values (before, after)."""
    plan: Plan

    @property
    def changes_learning(self) -> bool:
        """Whether the changes affect what the run learns, or the data it learns from."""
        return any(lever.changes_learning for lever in self.levers)

    @property
    def changes_arithmetic(self) -> bool:
        """Whether any of the changes lowers the precision of numbers or changes how they are rounded."""
        return any(lever.changes_arithmetic for lever in self.levers)

    @property
    def slower_percent(self) -> float:
        """Rough estimate of how much slower a step is, in percent; negative if it is faster."""
        return sum(lever.slower_percent for lever in self.levers)

    @property
    def summary(self) -> str:
        """One line for a list: the estimated change of speed, and whether arithmetic or learning changes."""
        slower = self.slower_percent
        speed = f"about {abs(slower):.0f} % {'slower' if slower > 0 else 'faster'}" if slower else "same speed"
        arithmetic = ", changes arithmetic" if self.changes_arithmetic else ""
        return speed + arithmetic + (", CHANGES WHAT IS LEARNED" if self.changes_learning else "")

    def as_json(self) -> dict[str, Any]:
        """The suggestion as a JSON object, an entry of what `tunedeck fit --json` prints."""
        return {
            "changes": {key: {"from": before, "to": after} for key, (before, after) in self.changes.items()},
            "peak_bytes": self.plan.peak_bytes,
            "margin_bytes": self.plan.margin_bytes,
            "host_bytes": self.plan.host_bytes,
            "micro_batch": self.plan.micro_batch,
            "slower_percent": self.slower_percent,
            "changes_learning": self.changes_learning,
            "changes_arithmetic": self.changes_arithmetic,
            "notes": [lever.note for lever in self.levers],
        }


@dataclass(frozen=True)
class Advice:
    """The plan of a run, and suggestions. `suggestions` make the run fit, and are empty if it fits already; those in
    `room` use the unused memory of a run that fits, and are empty if it does not fit."""

    plan: Plan
    suggestions: list[Suggestion]
    room: list[Suggestion]

    def as_json(self) -> dict[str, Any]:
        """The plan and all suggestions as the JSON object that `tunedeck fit --json` prints."""
        return {
            "plan": self.plan.as_json(),
            "suggestions": [suggestion.as_json() for suggestion in self.suggestions],
            "room": [suggestion.as_json() for suggestion in self.room],
        }


def advise(spec: RunSpec, *, longest: int | None = None) -> Advice:
    """Plan a run and search for suggestions. `longest`: tokens of the longest sequence; None: the length recorded when
    the data were last read, else data.max_length. Raises the errors of `make_plan`."""
    longest = longest or known_longest(spec.recipe)
    plan = make_plan(spec, longest=longest)
    if fits(plan):
        return Advice(plan, [], list(_room(spec, longest)))
    search = _suggestions if plan.predictor == "closed_form" else _simulated_suggestions
    return Advice(plan, list(search(spec, plan, longest)), [])


def fits(plan: Plan) -> bool:
    """Whether a run fits as it was planned: its peak on the device, and its offloads on the host."""
    return plan.verdict == "fits" and plan.host_fits


def possible_levers(spec: RunSpec, plan: Plan) -> list[Lever]:
    """The levers after which `train` would accept the run, either alone or together with the lever that turns full
    fine-tuning into LoRA."""
    levers = levers_of(spec, plan)
    adapters = [lever for lever in levers if "method.kind" in lever.keys]
    return [
        lever
        for lever in levers
        if not is_refused(changed(spec, (lever,)))
        or (lever not in adapters and adapters and not is_refused(changed(spec, (lever, *adapters))))
    ]


def changed(spec: RunSpec, levers: Levers) -> RunSpec:
    """A copy of the run spec with the changes of these levers; the copy is not checked."""
    return with_changes(spec, {key: value for lever in levers for key, value in lever.changes})


def _suggestions(spec: RunSpec, plan: Plan, longest: int | None) -> Iterator[Suggestion]:
    """Yield suggestions that `train` would not refuse and with which the run fits, in order of cost, at most
    MAX_SUGGESTIONS. `longest`: as in `advise`."""

    def holds(levers: Levers) -> bool:
        return not is_refused(changed(spec, levers)) and fits(_suggestion(spec, levers, longest).plan)

    found = fitting_sets(possible_levers(spec, plan), Trial(spec, longest), holds)
    yield from (_suggestion(spec, levers, longest) for levers in islice(found, MAX_SUGGESTIONS))


def _simulated_suggestions(spec: RunSpec, plan: Plan, longest: int | None) -> Iterator[Suggestion]:
    """Yield suggestions for a model family without a closed form, at most MAX_SUGGESTIONS. Each set of levers must be
    simulated, which takes seconds; so only single levers are tried, and the set of all levers that change neither
    learning nor arithmetic."""
    levers = possible_levers(spec, plan)
    free = tuple(lever for lever in levers if not lever.changes_learning and not lever.changes_arithmetic)
    sets: list[Levers] = [(lever,) for lever in levers] + ([free] if len(free) > 1 else [])
    found: list[frozenset[Lever]] = []
    for chosen in sorted(sets, key=lambda levers: (sum(lever.cost for lever in levers), len(levers))):
        overlaps = len({key for lever in chosen for key in lever.keys}) < sum(len(lever.keys) for lever in chosen)
        if overlaps or len(found) == MAX_SUGGESTIONS or any(earlier <= set(chosen) for earlier in found):
            continue
        suggestion = _simulated(spec, chosen, longest)
        if suggestion is not None and fits(suggestion.plan):
            found.append(frozenset(chosen))
            yield suggestion


def _simulated(spec: RunSpec, levers: Levers, longest: int | None) -> Suggestion | None:
    """The suggestion that applies `levers`; None if `train` would refuse the changed run. Some refusals are found only
    by the changed run's simulation: raises NotSimulatedError if it has not been run."""
    if is_refused(changed(spec, levers)):
        return None
    try:
        return _suggestion(spec, levers, longest)
    except NotSimulatedError:
        raise
    except UsageError:
        return None


def _suggestion(spec: RunSpec, levers: Levers, longest: int | None) -> Suggestion:
    """Apply `levers` and plan the changed run; returns the suggestion, whether or not the run fits. `longest`: tokens
    of the longest sequence; None: as in `make_plan`. Raises the errors of `make_plan`."""
    after = changed(spec, levers)
    length = min(longest, after.recipe.data.max_length) if longest else None
    in_order = sorted(levers, key=lambda lever: lever.cost)
    keys = [key for lever in in_order for key, _ in lever.changes]
    moved = {key: (value_of(spec, key), value_of(after, key)) for key in keys}
    return Suggestion(tuple(in_order), moved, make_plan(after, longest=length))


def _room(spec: RunSpec, longest: int | None) -> Iterator[Suggestion]:
    """Yield suggestions that use the unused memory of a run that fits: no gradient checkpointing, a larger micro-batch,
    longer sequences, or a higher rank. `longest`: as in `advise`."""
    for lever in room_levers(spec):
        if is_refused(changed(spec, (lever,))):
            continue
        suggestion = _simulated(spec, (lever,), None if "data.max_length" in lever.keys else longest)
        if suggestion is not None and fits(suggestion.plan):
            yield suggestion
