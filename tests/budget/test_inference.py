"""Compares predictions of evaluation and generation with the metered device, and tests their part in a run's plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.architecture.facts import Architecture, from_config
from engine.architecture.lookup import builtin_config, find_architecture
from engine.budget.advise.plan import make_plan
from engine.budget.advise.plan_evaluation import plan_evaluation
from engine.budget.predict import inference
from engine.budget.predict.inference import GENERATION_ROWS, cache_bytes, generation_bytes
from engine.budget.predict.prediction import predict
from engine.budget.predict.static import static_bytes
from engine.budget.trace.memory_config import memory_config_of
from engine.config.files.machine import older
from engine.config.schema.recipe import Generate
from engine.config.schema.run import RunSpec
from tests.budget.metered_step import (
    GEMMA3,
    GPT2,
    GPT_OSS,
    MIXTRAL,
    QWEN2,
    folder_of,
    measured_evaluation,
    measured_generation,
    run_spec,
)

TINY = from_config(builtin_config("builtin:tiny"))
LONG = Generate(max_new_tokens=4096)
HELD_OUT: dict[str, Any] = {"data": {"max_length": 512, "valid_fraction": 0.5}}


@pytest.mark.parametrize("family", [QWEN2, GEMMA3, GPT2, MIXTRAL, GPT_OSS], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluation_holds_what_the_metered_device_counts(family: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    spec = run_spec(folder_of(family, tmp_path / "model"), model={"dtype": dtype}, method={"rank": 8}, **HELD_OUT)
    predicted = sum(predict(find_architecture(spec), spec, rows=3, length=160).phases["evaluate"].values())
    assert -0.005 <= predicted / measured_evaluation(spec, 3, 160) - 1 <= 0.02


@pytest.mark.parametrize("family", [QWEN2, GPT2, MIXTRAL, GPT_OSS], ids=lambda config: config["model_type"])
@pytest.mark.parametrize(("prompt", "new_tokens"), [(100, 4), (8, 100)])
def test_generation_holds_what_the_metered_device_counts(
    family: dict[str, Any], prompt: int, new_tokens: int, tmp_path: Path
) -> None:
    spec = run_spec(folder_of(family, tmp_path / "model"), method={"rank": 8}, generate={"max_new_tokens": new_tokens})
    assert -0.01 <= predicted_generation(spec, prompt) / measured_generation(spec, 4, prompt) - 1 <= 0.02


def test_a_single_long_prompt_has_no_mask(tmp_path: Path) -> None:
    spec = run_spec(folder_of(QWEN2, tmp_path / "model"), method={"rank": 8}, generate={"max_new_tokens": 4})
    measured = measured_generation(spec, 1, 400)
    assert -0.01 <= predicted_generation(spec, 400, rows=1) / measured - 1 <= 0.01


def test_a_long_answer_in_eager_attention_repeats_keys_and_values(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"model": {"attention": "eager"}, "generate": {"max_new_tokens": 300}}
    spec = run_spec(folder_of(QWEN2, tmp_path / "model"), method={"rank": 8}, **tables)
    arch = find_architecture(spec)
    static = static_bytes(arch, memory_config_of(arch, spec)).total.static
    measured = measured_generation(spec, 4, 4) - static
    assert predicted_generation(spec, 4) - static == pytest.approx(measured, rel=0.02)


def test_scoring_is_planned_without_optimizer_state_and_with_the_cache_it_needs() -> None:
    answers: dict[str, Any] = {"evaluate": {"metrics": ["rouge"]}, "generate": {"max_new_tokens": 2000}}
    spec = run_spec(device={"kind": "metered", "memory_gib": 0.25}, **HELD_OUT, **answers)
    planned = plan_evaluation(spec)
    arch, config = find_architecture(spec), memory_config_of(find_architecture(spec), spec)
    assert list(planned.phases) == ["load", "evaluate", "generate"] and "optimizer" not in planned.phases["evaluate"]
    assert 1 < planned.generate_rows < GENERATION_ROWS and planned.fits
    assert planned.cache_bytes == planned.generate_rows * cache_bytes(arch, config, planned.length + 2000)
    assert planned.cache_bytes < planned.phases["generate"]["activations"]
    assert not plan_evaluation(run_spec(device={"kind": "metered", "memory_gib": 0.004}, **HELD_OUT, **answers)).fits


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.2}, {"temperature": 0.7, "top_k": 20}, {"temperature": 0.7, "top_p": 0.9}],
    ids="-".join,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_holds_what_the_metered_device_counts(settings: dict[str, float], dtype: str, tmp_path: Path) -> None:
    folder = folder_of({**QWEN2, "vocab_size": 60000}, tmp_path / "model")
    spec = run_spec(folder, model={"dtype": dtype}, method={"rank": 8}, generate={"max_new_tokens": 12, **settings})
    assert predicted_generation(spec, 8) == pytest.approx(measured_generation(spec, 4, 8), rel=0.005)


def predicted_generation(spec: RunSpec, prompt: int, rows: int = 4) -> int:
    """Predicted peak of answering `rows` prompts of this many tokens."""
    arch = find_architecture(spec)
    config = memory_config_of(arch, spec)
    above = generation_bytes(arch, config, rows=rows, prompt=prompt, generate=spec.recipe.generate)
    return static_bytes(arch, config).total.static + above


def test_prompts_of_several_rows_repeat_heads_while_they_are_answered_before_transformers_5_23(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tests above measure the installed release of transformers; here the prediction is switched to the behaviour
    of earlier releases, which is not measured."""
    arch = from_config(QWEN2)

    def held(rows: int, *, repeats: bool) -> int:
        monkeypatch.setattr(inference, "DECODES_WITH_REPEATED_HEADS", repeats)
        config, generate = memory_config_of(arch, run_spec()), Generate(max_new_tokens=100)
        return generation_bytes(arch, config, rows=rows, prompt=8, generate=generate)

    assert held(4, repeats=True) > held(4, repeats=False)
    assert held(1, repeats=True) == held(1, repeats=False)
    assert older("5.22.2", "5.23") and older("5.9", "5.23") and not older("5.23.0", "5.23") and not older("", "5.23")


def phases(arch: Architecture = TINY, **tables: Any) -> dict[str, dict[str, int]]:
    return predict(arch, run_spec(**tables), rows=2, length=128).phases


def test_a_run_without_validation_has_no_row_for_it() -> None:
    assert not {"evaluate", "generate"} & set(phases())


def test_samples_and_exact_match_add_generation() -> None:
    assert "generate" not in phases(**HELD_OUT)
    assert "generate" in phases(**HELD_OUT, eval={"samples": 2})
    assert "generate" in phases(**HELD_OUT, eval={"metrics": ["loss", "exact_match"]})


def test_a_sliding_window_bounds_what_a_layer_caches() -> None:
    short, long = (
        generation_bytes(arch, memory_config_of(arch, run_spec()), rows=1, prompt=1, generate=LONG)
        for arch in (from_config({**GEMMA3, "num_hidden_layers": 6}), from_config({**GEMMA3, "sliding_window": None}))
    )
    assert short < long


def test_generation_that_cannot_fit_decides_the_verdict() -> None:
    capacity = make_plan(run_spec(**HELD_OUT)).peak_bytes * 1.02 / 2**30
    device = {"kind": "metered", "memory_gib": capacity}
    long_answers: dict[str, Any] = {"eval": {"samples": 1}, "generate": {"max_new_tokens": 200_000}}
    assert make_plan(run_spec(device=device, train={"micro_batch": 1}, **HELD_OUT)).verdict == "fits"
    plan = make_plan(run_spec(device=device, train={"micro_batch": 1}, **HELD_OUT, **long_answers))
    assert (plan.verdict, plan.prediction.deciding_phase) == ("does_not_fit", "generate")
