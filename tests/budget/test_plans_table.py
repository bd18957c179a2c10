"""The table of every shipped profile and recipe (`make plans`)."""

from __future__ import annotations

from benchmarks.plans import MODELS, Refused, Row, rows, table
from engine.config.files.find import list_spec_files


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
    answers = [one for one in rows() if isinstance(one, Row)]
    verdicts = {one.model: one.verdict for one in answers if (one.recipe, one.profile) == ("lora", "24gb")}
    assert set(verdicts) == set(MODELS)
    assert verdicts["Qwen/Qwen2.5-0.5B"] == "fits"
    assert verdicts["Qwen/Qwen2.5-72B"] == "does_not_fit"
