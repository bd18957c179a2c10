"""Asks `fit` random questions and checks its answers: each offer by a plan, some by a search, some by runs.

Run: python -m benchmarks.advice --questions 500 --searched 40 [--trained 30] [--seed N]

A question is a model, a shipped recipe, a shipped profile with another amount of memory, and overrides. An offer is a
set of levers, and a lever is one change of recipe keys with its cost. Every offer is resolved anew from the files, as
`tunedeck plan` does with `--set`: it must be accepted, and its plan must be the one that `fit` printed. For some of the
questions that do not fit as written, every set of levers that costs less than the cheapest offer (every set if there is
none, MOST_SETS at most) is planned, to find offers that `fit` overlooked. With --trained, small runs train on the
metered device with their first offer; none may run out of memory.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.architecture.lookup import find_architecture, find_facts
from engine.budget.advise.levers import Lever, is_refused
from engine.budget.advise.plan import make_plan
from engine.budget.advise.search import Advice, Suggestion, Trial, advise, changed, fits, possible_levers
from engine.budget.predict.prediction import predict
from engine.checks.run import PLAN, check_run
from engine.config.changes import with_changes
from engine.config.load import resolve
from engine.config.schema.run import RunSpec
from engine.errors import TunedeckError

MODELS = (
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.1", "google/gemma-2-2b", "google/gemma-3-1b-pt",
)  # fmt: skip
PROFILES = ("24gb", "80gb", "4xh100", "demo-2")
RECIPES = ("lora", "full", "attention-lora")
CHOICES: dict[str, tuple[str, ...]] = {
    "train.gradient_checkpointing": ("true", "false"),
    "train.loss": ("auto", "plain"),
    "train.micro_batch": ("auto", "1", "4"),
    "train.rounding": ("exact", "stochastic"),
    "train.optimizer": ("adamw", "sgd", "adafactor"),
    "train.optimizer_offload": ("false", "true"),
    "train.mlp_tiles": ("1", "4"),
    "train.activation_offload": ("false", "true"),
    "data.max_length": ("512", "2048", "16384"),
    "data.packing": ("false", "true"),
    "model.dtype": ("auto", "float32"),
    "device.host_memory_gib": ("32", "256"),
    "parallel.strategy": ("replicated", "sharded"),
}
"""Overrides of which each is drawn in half of the questions; those that a profile or recipe refuses are drawn again."""
MOST_SETS = 3000
"""Sets of levers that are planned for one searched question."""


@dataclass(frozen=True)
class Question:
    """The arguments of one call of `tunedeck advise`: profile, recipe and overrides."""

    profile: str
    recipe: str
    overrides: tuple[str, ...]

    def spec(self, more: Sequence[str] = ()) -> RunSpec:
        """Resolve and check the run spec, with `more` overrides (KEY=VALUE) after the question's own. Raises
        TunedeckError if the spec is refused."""
        return check_run(resolve(self.profile, self.recipe, [*self.overrides, *more]).spec, PLAN).require().spec


def questions(count: int, seed: int) -> Iterator[tuple[Question, RunSpec]]:
    """Yield `count` random questions, drawn with `seed`, that `fit` accepts, each with its run spec."""
    drawn, found = random.Random(seed), 0
    while found < count:
        profile, recipe = drawn.choice(PROFILES), drawn.choice(RECIPES)
        overrides = [f"model.id={drawn.choice(MODELS)}"]
        overrides += [f"{key}={drawn.choice(values)}" for key, values in CHOICES.items() if drawn.random() < 0.5]
        question = Question(profile, recipe, tuple(overrides))
        try:
            spec = question.spec()
            needs_gib = make_plan(with_changes(spec, {"device.memory_gib": 4000.0})).prediction.device_bytes / 2**30
            memory_gib = spec.profile.device.reserve_gib + needs_gib * drawn.uniform(0.1, 1.3)
            overrides.append(f"device.memory_gib={memory_gib:.4f}")
            strategy = Question(profile, recipe, tuple(overrides)).spec().profile.parallel.strategy
            # An offer is planned with the strategy of its question, so "auto" must not be decided again with it.
            question = Question(profile, recipe, (*overrides, f"parallel.strategy={strategy}"))
            yield question, question.spec()
        except TunedeckError:
            continue
        found += 1


def broken_offers(question: Question, advice: Advice) -> list[str]:
    """A line of text for each offer that is refused, does not fit, or has another plan than `fit` says."""
    return [text for offer in (*advice.suggestions, *advice.room) if (text := _broken(question, offer))]


def _broken(question: Question, offer: Suggestion) -> str:
    changes = [f"{key}={json.dumps(after)}" for key, (_, after) in offer.changes.items()]
    try:
        plan = make_plan(question.spec(changes))
    except TunedeckError as error:
        return f"{question} with {changes} is refused: {error.found}"
    if not fits(plan) or plan.as_json() != offer.plan.as_json():
        return f"{question} with {changes}: planned {plan.verdict}, {plan.peak_bytes:,}; said {offer.plan.peak_bytes:,}"
    return ""


def overlooked(spec: RunSpec, advice: Advice, most_sets: int = MOST_SETS) -> list[dict[str, Any]]:
    """The first set of levers that fits and costs less than the cheapest offer: for each lever, its recipe keys and new
    values. Empty if there is none among the first `most_sets` sets, or if the run fits as written."""
    if fits(advice.plan):
        return []
    costs = [sum(lever.cost for lever in offer.levers) for offer in advice.suggestions]
    facts = find_facts(spec.recipe.model)
    levers = sorted(possible_levers(spec, advice.plan, facts), key=lambda lever: lever.cost)
    trial, least = Trial(spec, None, facts), min(costs, default=float("inf"))
    for number, chosen in enumerate(_cheaper(levers, least)):
        if number == most_sets:
            break
        after = changed(spec, chosen)
        if trial.fits(chosen) and not is_refused(after, facts) and fits(make_plan(after)):
            return [dict(lever.changes) for lever in chosen]
    return []


def _cheaper(levers: Sequence[Lever], most: float, chosen: tuple[Lever, ...] = ()) -> Iterator[tuple[Lever, ...]]:
    """Yield `chosen` together with each non-empty set of `levers` whose `Lever.cost` (percent) sums to less than `most`
    and that changes no key twice. `levers` must be in the order of their costs."""
    for place, lever in enumerate(levers):
        if lever.cost >= most:
            return
        if not any(lever.keys & other.keys for other in chosen):
            yield (*chosen, lever)
            yield from _cheaper(levers[place + 1 :], most - lever.cost, (*chosen, lever))


def failures_of_runs(count: int, seed: int) -> int:
    """Draw `count` small runs with `seed` that do not fit as they are written, and train each with the changes of the
    first suggestion of `fit`; returns how many ran out of memory nevertheless."""
    from tests.budget.capacity_runs import capacity_cases, spec_of
    from tests.train.run_helpers import new_run, of_kind, train

    drawn, failed = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as temporary:
        for number, case in enumerate(capacity_cases(count, seed)):
            folder = Path(temporary, str(number))
            roomy = spec_of(case, folder / "roomy", 2.0**33)
            needs = predict(find_architecture(roomy), roomy, rows=case.rows, length=case.length).peak_bytes
            capacity = drawn.uniform(0.4, 0.95) * needs
            advice = advise(spec_of(case, folder / "tight", capacity))
            if advice.suggestions:
                changes = {key: after for key, (_, after) in advice.suggestions[0].changes.items()}
                spec = with_changes(spec_of(case, folder / "run", capacity), changes)
                _, events = train(new_run(folder / "runs", spec))
                failed += bool(of_kind(events, "backoff"))
    return failed


def main() -> None:
    """Run all checks, and print a line for each kind of check."""
    parser = argparse.ArgumentParser(description="ask fit random questions and check its answers")
    for name, default in (("questions", 500), ("searched", 40), ("trained", 0), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    offers, broken, missed, searched = 0, list[str](), list[str](), 0
    for question, spec in questions(asked.questions, asked.seed):
        advice = advise(spec)
        offers += len(advice.suggestions) + len(advice.room)
        broken += broken_offers(question, advice)
        if not fits(advice.plan) and searched < asked.searched:
            searched += 1
            missed += [f"{question}: {found}" for found in [overlooked(spec, advice)] if found]
    print("\n".join([*broken, *missed]))
    print(f"{asked.questions} questions, {offers} offers, {len(broken)} do not hold")
    print(f"{searched} searched, {len(missed)} overlooked")
    if asked.trained:
        print(f"{asked.trained} runs, {failures_of_runs(asked.trained, asked.seed)} out of memory")


if __name__ == "__main__":
    main()
