"""The table of every shipped profile and recipe (`make plans`)."""

from __future__ import annotations

from benchmarks.plans import MODELS, Refused, rows, table
from engine.budget.advise.plan import make_plan
from engine.config.files.find import list_spec_files
from engine.config.load import resolve


def test_every_shipped_profile_and_recipe_is_answered_or_refused_with_the_reason() -> None:
    found = list(rows(["Qwen/Qwen2.5-0.5B"]))
    pairs = {(one.profile, one.recipe) for one in found}
    assert pairs == {(p.name, r.name) for p in list_spec_files("profile") for r in list_spec_files("recipe")}
    refused = {(one.profile, one.recipe): one.reason for one in found if isinstance(one, Refused)}
    four_share_a_sequence = ("demo-2", "qwen3-4b-longcontext")
    assert set(refused) == {*((name, "qlora") for name in ("demo", "demo-2", "demo-4")), four_share_a_sequence}
    assert "CUDA" in refused["demo", "qlora"] and "with 2 devices" in refused[four_share_a_sequence]
    lines = table(found)
    assert sum(line.startswith("lora ") for line in lines) == len(list_spec_files("profile"))
    assert f"{len(found) - len(refused)} answers: median" in lines[-1]


def test_a_dozen_models_have_shipped_facts_and_one_that_is_too_large_does_not_fit() -> None:
    assert len(set(MODELS)) >= 12
    verdicts = {model: make_plan(resolve("24gb", "lora", [f"model.id={model}"]).spec).verdict for model in MODELS}
    assert verdicts["Qwen/Qwen2.5-0.5B"] == "fits"
    assert verdicts["Qwen/Qwen2.5-72B"] == "does_not_fit"
