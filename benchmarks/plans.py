"""Plans every shipped recipe on every shipped profile with a dozen models: verdict, peak, micro-batch.

Run: python -m benchmarks.plans [--json]        (or: make plans; no GPU, no torch, a few seconds)

The last line says how much processor time an answer, which is one call of `make_plan`, took with the garbage collector
disabled: the first call for a model and a recipe traces the model, later calls reuse the trace.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.plan import make_plan
from engine.config.files.find import list_spec_files
from engine.config.load import resolve
from engine.config.schema.run import RunSpec
from engine.errors import UsageError

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
WARM_UP = "80gb", "attention-lora", ["model.id=Qwen/Qwen2.5-1.5B"]
"""A plan that is made first and not printed, because the first one of a process imports modules and reads files."""


@dataclass(frozen=True)
class Row:
    """The result of planning one model with one recipe on one profile."""

    model: str
    recipe: str
    profile: str
    verdict: str
    deciding_phase: str
    peak_bytes: int
    device_bytes: int
    capacity_bytes: int
    micro_batch: int
    seconds: float


@dataclass(frozen=True)
class Refused:
    """A model, recipe and profile for which there is no plan, because the device does not support what the recipe asks
    for."""

    model: str
    recipe: str
    profile: str
    reason: str


def rows(models: Sequence[str] = MODELS) -> Iterator[Row | Refused]:
    """Plan every shipped recipe on every shipped profile with each model. The demo recipe is planned only with its own
    model."""
    make_plan(resolve(*WARM_UP).spec)
    for recipe in (found.name for found in list_spec_files("recipe")):
        for model in (None,) if recipe == "demo" else models:
            for profile in (found.name for found in list_spec_files("profile")):
                try:
                    yield _answer(resolve(profile, recipe, [f"model.id={model}"] if model else ()).spec)
                except UsageError as error:
                    yield Refused(model or "", recipe, profile, error.found.rpartition(": ")[2])


def _answer(spec: RunSpec) -> Row:
    gc.disable()
    begun = time.process_time()
    plan = make_plan(settle_parallel(spec).spec)
    seconds = time.process_time() - begun
    gc.enable()
    return Row(
        model=spec.recipe.model.id,
        recipe=spec.recipe.name,
        profile=spec.profile.name,
        verdict=plan.verdict,
        deciding_phase=plan.prediction.deciding_phase,
        peak_bytes=plan.peak_bytes,
        device_bytes=plan.prediction.device_bytes,
        capacity_bytes=plan.capacity_bytes,
        micro_batch=plan.micro_batch,
        seconds=seconds,
    )


def table(found: Sequence[Row | Refused]) -> list[str]:
    """Format the results as lines of text: one per plan, one per refused pair of recipe and profile, and one about the
    time."""
    lines = [f"{'recipe':<15}{'model':<37}{'profile':<8}{'verdict':<14}{'peak GiB':>9}{'of':>8}{'rows':>5}"]
    answers = [one for one in found if isinstance(one, Row)]
    lines += [
        f"{one.recipe:<15}{one.model:<37}{one.profile:<8}{one.verdict:<14}{one.device_bytes / 2**30:>9.2f}"
        f"{one.capacity_bytes / 2**30:>8.2f}{one.micro_batch:>5}"
        for one in answers
    ]
    refused = {(one.recipe, one.profile): one.reason for one in found if isinstance(one, Refused)}
    lines += ["", *(f"{recipe} on {profile} is refused: {reason}" for (recipe, profile), reason in refused.items())]
    milliseconds = [1000 * one.seconds for one in answers]
    median, slowest = statistics.median(milliseconds), max(milliseconds)
    return [*lines, f"{len(answers)} answers: median {median:.1f} ms, slowest {slowest:.1f} ms"]


def main() -> None:
    """Print the table, or with --json the plans as a JSON list."""
    parser = argparse.ArgumentParser(description="plan every shipped profile and recipe with a dozen models")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = list(rows())
    print(json.dumps([asdict(one) for one in found], indent=1) if arguments.json else "\n".join(table(found)))


if __name__ == "__main__":
    main()
