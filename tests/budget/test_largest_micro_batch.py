"""Tests that the largest micro-batch that fits is the one that trying every number of sequences finds."""

from __future__ import annotations

import pytest

from engine.architecture.lookup import find_architecture
from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.plan import make_plan
from engine.budget.predict.prediction import Predictor
from engine.config.load import resolve
from engine.config.schema.run import RunSpec

CASES: list[tuple[str, str, str]] = [
    ("24gb", "lora", "Qwen/Qwen2.5-7B"),
    ("24gb", "full", "Qwen/Qwen3-0.6B"),
    ("48gb", "full", "google/gemma-2-2b"),
    ("24gb", "qlora", "google/gemma-2-9b"),
    ("48gb", "lora", "openai/gpt-oss-20b"),
    ("4xh100", "full", "meta-llama/Llama-3.1-8B"),
    ("demo", "demo", "builtin:tiny"),
]


@pytest.mark.parametrize(("profile", "recipe", "model"), CASES)
def test_the_planned_micro_batch_is_the_largest_of_all(profile: str, recipe: str, model: str) -> None:
    sets = [f"model.id={model}", "train.batch_size=24", "train.micro_batch=auto"]
    sets += ["train.gradient_checkpointing=true"]  # else a smaller micro-batch may be the faster one
    spec = settle_parallel(resolve(profile, recipe, sets).spec).spec
    length = spec.recipe.data.max_length
    predictor = Predictor(find_architecture(spec), spec)
    needs = [predictor.predict(rows, length).device_bytes for rows in range(1, predictor.batch + 1)]
    middle = needs[predictor.batch // 2]
    for capacity in (needs[0], needs[1] - 1, middle - 1, middle, max(needs) - 1, needs[-1]):
        tried = with_capacity(spec, capacity)
        asked = Predictor(predictor.arch, tried)  # text is generated with as many rows as there is room for
        fitting = [
            rows for rows in range(1, predictor.batch + 1) if asked.predict(rows, length).device_bytes <= capacity
        ]
        assert make_plan(tried).micro_batch == max(fitting, default=1)


def with_capacity(spec: RunSpec, capacity_bytes: int) -> RunSpec:
    """The same run on devices of `capacity_bytes`."""
    device = spec.profile.device.model_copy(update={"memory_gib": capacity_bytes / 2**30, "reserve_gib": 0.0})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"device": device})})
