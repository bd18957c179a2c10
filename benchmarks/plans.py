"""Every shipped profile and recipe with a dozen models: verdict, peak, micro-batch, and how long each answer took.

Run: python -m benchmarks.plans [--json]        (or: make plans; no GPU, no torch, half a minute to two)

Files are read and patterns compiled before the clock starts: an answer is one call of `make_plan`, and its time is the
processor's. What the machine does beside is not the plan's: everything is asked in rounds, the fastest answer of all
rounds counts, and the garbage collector waits, as in `timeit`. A shared machine may be slow for all of them: what has
still taken a millisecond then is asked in further rounds, a pause before each; the lines at the end say how many were.
The first answer for a model and a recipe works out their closed form, each time from nothing; the first on another
device asks for remedies and dtypes of its own, but shares what it can; later ones only evaluate. The last lines give
all three.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import _lru_cache_wrapper

from engine.budget.advise.plan import make_plan
from engine.budget.architecture.lookup import find_architecture
from engine.errors import SpecError
from engine.spec.files.find import list_spec_files
from engine.spec.load import resolve
from engine.spec.schema.run import RunSpec

MODELS = (
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-72B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-30B-A3B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "google/gemma-2-9b",
    "google/gemma-3-1b-pt",
    "openai/gpt-oss-20b",
)
OTHER = "80gb", "attention-lora", ["model.id=Qwen/Qwen2.5-1.5B"]
ROUNDS = 120
"""Over all questions, so that the tries of one are seconds apart: a shared machine is slow for seconds at a time."""
MORE_ROUNDS, PAUSE_SECONDS = 480, 0.2
"""At most, of what has been slow in all of them: at other times it is slow for a minute."""
SLOW_SECONDS = 0.001

STAYS = "engine.budget.architecture.lookup", "engine.budget.globs"
"""What these modules remember is what they have read, and expressions they have compiled."""


@dataclass(frozen=True)
class Row:
    """One answer."""

    model: str
    recipe: str
    profile: str
    verdict: str
    deciding_phase: str
    peak_bytes: int
    device_bytes: int
    capacity_bytes: int
    micro_batch: int
    new: bool
    """The first for its model and recipe."""
    first_seconds: float
    again_seconds: float
    rounds: int


@dataclass(frozen=True)
class Refused:
    """A question without an answer: what the recipe asks, the device cannot do."""

    model: str
    recipe: str
    profile: str
    reason: str


def rows(
    models: Sequence[str] = MODELS, *, rounds: int = ROUNDS, more_rounds: int = MORE_ROUNDS
) -> Iterator[Row | Refused]:
    """Every shipped recipe on every shipped profile for each model; the demo recipe has a model of its own.

    An answer about none of them comes first: what a process imports and compiles at the first one is its start.
    """
    make_plan(resolve(*OTHER).spec)
    profiles = [found.name for found in list_spec_files("profile")]
    questions: list[Question] = []
    for recipe in (found.name for found in list_spec_files("recipe")):
        for model in (None,) if recipe == "demo" else models:
            asked: list[RunSpec] = []
            for profile in profiles:
                try:
                    asked.append(resolve(profile, recipe, [f"model.id={model}"] if model else ()).spec)
                except SpecError as error:
                    yield Refused(model or "", recipe, profile, str(error).rpartition(": ")[2])
            questions.append(Question(asked))
    for _ in range(rounds):
        for question in questions:
            question.ask()
    for _ in range(more_rounds):
        slow = [question for question in questions if question.slow]
        if not slow:
            break
        time.sleep(PAUSE_SECONDS)
        for question in slow:
            question.ask()
    for question in questions:
        yield from question.answers()


class Question:
    """One model with one recipe, on several profiles, and the fastest answers so far."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        self.specs = specs
        self.rounds = 0
        self.first, self.again = [math.inf] * len(specs), [math.inf] * len(specs)
        """Seconds, for each profile."""

    @property
    def slow(self) -> bool:
        """Whether one of the answers has taken too long each time."""
        return max(*self.first, *self.again) >= SLOW_SECONDS

    def ask(self) -> None:
        """Once more, from nothing, and again."""
        self.rounds += 1
        self.first = list(map(min, self.first, _from_nothing(self.specs)))
        self.again = list(map(min, self.again, [_timed(spec) for spec in self.specs]))

    def answers(self) -> Iterator[Row]:
        """What they were."""
        for number, spec in enumerate(self.specs):
            plan = make_plan(spec)
            yield Row(
                model=spec.recipe.model.id,
                recipe=spec.recipe.name,
                profile=spec.profile.name,
                verdict=plan.verdict,
                deciding_phase=plan.prediction.deciding_phase,
                peak_bytes=plan.peak_bytes,
                device_bytes=plan.prediction.device_bytes,
                capacity_bytes=plan.capacity_bytes,
                micro_batch=plan.micro_batch,
                new=number == 0,
                first_seconds=self.first[number],
                again_seconds=self.again[number],
                rounds=self.rounds,
            )


def _from_nothing(specs: Sequence[RunSpec]) -> list[float]:
    """What each answer takes where nothing is known but what the ones before it have worked out."""
    for name, module in list(sys.modules.items()):
        if name.startswith("engine.budget."):
            for value in vars(module).values():
                if isinstance(value, _lru_cache_wrapper) and value.__module__ not in STAYS:
                    value.cache_clear()
    return [_timed(spec) for spec in specs]


def _timed(spec: RunSpec) -> float:
    find_architecture(spec)  # reads files where it must: no part of the answer
    gc.disable()
    begun = time.thread_time()
    make_plan(spec)
    seconds = time.thread_time() - begun
    gc.enable()
    return seconds


def table(found: Sequence[Row | Refused]) -> list[str]:
    """A line per question, then what is refused once per reason, then the times."""
    lines = [f"{'recipe':<15}{'model':<37}{'profile':<8}{'verdict':<14}{'peak GiB':>9}{'of':>8}{'rows':>5}{'ms':>7}"]
    answers = [one for one in found if isinstance(one, Row)]
    lines += [
        f"{one.recipe:<15}{one.model:<37}{one.profile:<8}{one.verdict:<14}{one.device_bytes / 2**30:>9.2f}"
        f"{one.capacity_bytes / 2**30:>8.2f}{one.micro_batch:>5}{1000 * one.again_seconds:>7.2f}"
        for one in answers
    ]
    refused = {(one.recipe, one.profile): one.reason for one in found if isinstance(one, Refused)}
    lines += ["", *(f"{recipe} on {profile} is refused: {reason}" for (recipe, profile), reason in refused.items())]
    for name, times in (
        ("first for a model and recipe", [one.first_seconds for one in answers if one.new]),
        ("first on another device", [one.first_seconds for one in answers if not one.new]),
        ("asked again", [one.again_seconds for one in answers]),
    ):
        slow = sum(seconds >= SLOW_SECONDS for seconds in times)
        lines.append(
            f"{name}: median {1000 * statistics.median(times):.2f} ms, slowest {1000 * max(times):.2f} ms; "
            f"{slow} of {len(times)} take a millisecond or more"
        )
    rounds = [one.rounds for one in answers if one.new]
    further = [count for count in rounds if count > min(rounds)]
    more = f", {len(further)} of {len(rounds)} models and recipes in up to {max(further)}" if further else ""
    lines.append(f"each asked in {min(rounds)} rounds{more}")
    return lines


def main() -> None:
    """Print the table, or with --json a list of rows."""
    parser = argparse.ArgumentParser(description="plan every shipped profile and recipe with a dozen models")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = list(rows())
    print(json.dumps([asdict(one) for one in found], indent=1) if asked.json else "\n".join(table(found)))


if __name__ == "__main__":
    main()
