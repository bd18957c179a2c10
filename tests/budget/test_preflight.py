"""Warnings before a start, and combinations that are refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from engine.budget.lookup import find_architecture
from engine.budget.preflight import checkpoints_bytes, warnings_of
from engine.cli import app
from engine.errors import SpecError
from engine.spec.load import resolve
from engine.spec.run import RunSpec


def spec_of(recipe: str, *sets: str, profile: str = "80gb") -> RunSpec:
    return resolve(profile, recipe, sets).spec


def warned(spec: RunSpec, free_disk_bytes: int | None = None) -> str:
    return "\n".join(warnings_of(find_architecture(spec), spec, free_disk_bytes=free_disk_bytes))


@pytest.mark.parametrize("change", ['model.dtype="bfloat16"', 'model.attention="flash"'])
def test_a_turing_card_refuses_what_needs_ampere_and_names_what_is_allowed(change: str) -> None:
    model = "model.id=Qwen/Qwen2.5-0.5B"
    with pytest.raises(SpecError) as refused:
        resolve("24gb", "lora", [model, change, "device.compute_capability=7.5"])
    assert "7.5" in str(refused.value)
    assert '"auto"' in str(refused.value)
    resolve("24gb", "lora", [model, change])


def test_four_bits_for_fused_experts_are_warned_of_but_not_for_a_dense_model() -> None:
    assert "fused experts" in warned(spec_of("qlora", "model.id=openai/gpt-oss-20b"))
    assert not warned(spec_of("qlora", "model.id=Qwen/Qwen2.5-7B"))


def test_generation_inside_training_is_warned_of_where_it_happens() -> None:
    with_samples = ["model.id=Qwen/Qwen2.5-7B", "data.valid_fraction=0.1", "eval.samples=3"]
    assert "generate" in warned(spec_of("lora", *with_samples))
    assert not warned(spec_of("lora", *with_samples[:2], "eval.samples=0"))


def test_too_little_disk_is_warned_of_exactly_where_it_is_too_little() -> None:
    spec = spec_of("full", "model.id=Qwen/Qwen2.5-0.5B")
    needed = checkpoints_bytes(find_architecture(spec), spec)
    assert needed > 2 * 494_032_768 * 3  # weights and two moments in bf16, several times
    assert "checkpoint.keep" in warned(spec, needed - 1)
    assert not warned(spec, needed)


def test_plan_prints_its_warnings_beside_the_answer() -> None:
    shown = CliRunner().invoke(app, ["plan", "-p", "80gb", "-r", "qlora", "--set", "model.id=openai/gpt-oss-20b"])
    assert shown.exit_code == 0
    assert "fused experts" in shown.stderr
    assert "fused experts" not in shown.stdout
