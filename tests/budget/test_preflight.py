"""Warnings before a start, and combinations that are refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.architecture.lookup import find_architecture, find_facts
from engine.budget.advise.preflight import checkpoints_bytes, notes_on_kernels, warnings_of
from engine.budget.predict import shards
from engine.budget.trace import memory_config
from engine.checks.run import PLAN, check_run
from engine.cli import app
from engine.config.load import resolve
from engine.config.schema.run import RunSpec
from engine.errors import SpecError, TunedeckError
from engine.launch.create_run import create_run


def spec_of(recipe: str, *sets: str, profile: str = "80gb") -> RunSpec:
    return resolve(profile, recipe, sets).spec


def warned(spec: RunSpec, free_disk_bytes: int | None = None) -> str:
    return "\n".join(warnings_of(find_facts(spec.recipe.model), spec, free_disk_bytes=free_disk_bytes))


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


VISION = ("model.id=Qwen/Qwen2.5-VL-3B-Instruct", "data.sources.main.format=image-chat")


def test_images_larger_than_a_sequence_are_warned_of_with_a_size_that_fits() -> None:
    said = warned(spec_of("lora", *VISION, "data.max_length=2048"))
    assert "16384 tokens" in said and "data.max_length is 2048" in said
    size = next(word for word in said.split() if word.startswith("data.image_max_pixels="))
    assert not warned(spec_of("lora", *VISION, "data.max_length=2048", size))


def test_images_for_a_model_that_cannot_see_are_warned_of() -> None:
    assert "no vision encoder" in warned(spec_of("lora", "model.id=Qwen/Qwen2.5-7B", VISION[1]))


def test_weights_trained_in_float16_beside_adapters_are_warned_of() -> None:
    sets = ["model.id=Qwen/Qwen2.5-7B", "model.dtype=float16"]
    assert "trained in float16" in warned(spec_of("lora", *sets, "method.also_train=['lm_head']"))
    assert not warned(spec_of("lora", *sets))
    assert not warned(spec_of("lora", sets[0], "method.also_train=['lm_head']"))


def test_offload_from_host_memory_to_itself_is_warned_of() -> None:
    sets = ["model.id=Qwen/Qwen2.5-7B", "train.optimizer_offload=true"]
    host = spec_of("lora", *sets, "device.kind=cpu", profile="demo")
    assert "train.optimizer_offload has no effect" in warned(host)
    assert not warned(spec_of("lora", *sets))


def test_activations_offloaded_beside_checkpoints_are_warned_of_where_the_run_fits_without() -> None:
    sets = ["model.id=Qwen/Qwen2.5-7B", "train.activation_offload=true"]
    assert "set train.activation_offload=false" in warned(spec_of("lora", *sets, "train.gradient_checkpointing=true"))
    assert not warned(spec_of("lora", *sets, "train.gradient_checkpointing=false"))
    sets += ["train.gradient_checkpointing=true", "device.memory_gib=17.0", "model.kernels=torch"]
    short = spec_of("lora", *sets, profile="24gb")
    assert not warned(short)


def test_a_plan_says_where_the_disk_of_the_runs_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 9 * 10**8, 10**8))
    shown = CliRunner().invoke(app, ["plan", "-p", "80gb", "-r", "full", "--runs", str(tmp_path / "runs")])
    assert "checkpoint.keep" in shown.stderr


@pytest.mark.parametrize("command", ["plan", "advise", "train"])
def test_packing_where_documents_would_mix_is_refused_before_anything_is_loaded(tmp_path: Path, command: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    sets = ["--set", f"model.id={tmp_path}", "--set", "data.packing=true"]
    refused = CliRunner().invoke(app, [command, "-p", "80gb", "-r", "lora", *sets]).exception
    assert isinstance(refused, TunedeckError)
    assert refused.found.startswith("data.packing = true, but mamba carries a state")


def test_shards_under_a_version_of_torch_that_is_not_known_are_warned_of() -> None:
    spec = spec_of("full", "model.id=Qwen/Qwen2.5-7B", "parallel.strategy=sharded", profile="4xh100")
    facts = find_facts(spec.recipe.model)
    (warning,) = (text for text in warnings_of(facts, spec, torch_version="2.99.0") if "2.99.0" in text)
    assert "restarts all ranks" in warning
    assert not any("restarts all ranks" in text for text in warnings_of(facts, spec, torch_version="2.13.0"))


def test_a_torch_that_is_too_old_for_shards_is_said_by_the_plan_and_refused_by_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("full", "model.id=Qwen/Qwen2.5-7B", "parallel.strategy=sharded", profile="4xh100")
    monkeypatch.setattr(shards, "installed", lambda package: "2.12.1+cu130")
    said = "needs torch 2.13, but 2.12.1+cu130 is installed"
    assert said in "\n".join(check_run(spec, PLAN).reported)
    with pytest.raises(TunedeckError, match=re.escape(said)) as refused:
        create_run(spec, tmp_path)
    assert 'or set parallel.strategy = "replicated"' in refused.value.render()
    assert not list(tmp_path.iterdir())


def test_shards_over_several_machines_are_warned_of_where_each_device_holds_the_model() -> None:
    over = ["model.id=Qwen/Qwen2.5-7B", "parallel.strategy=sharded", "nodes.count=2"]
    assert 'set parallel.strategy="replicated"' in warned(spec_of("lora", *over, profile="4xh100"))
    assert "machines" not in warned(spec_of("full", *over, profile="4xh100")), "needs its shards"
    assert "machines" not in warned(spec_of("lora", *over[:2], profile="4xh100")), "one machine"


def test_plan_says_what_crosses_the_network() -> None:
    command = ["plan", "-p", "4xh100", "-r", "lora", "--set", "model.id=Qwen/Qwen2.5-7B", "--set", "nodes.count=2"]
    replicated, sharded = (
        " ".join(CliRunner().invoke(app, [*command, "--set", f"parallel.strategy={strategy}"]).stdout.split())
        for strategy in ("replicated", "sharded")
    )
    assert "each of 2 machines receives at least 154.0 MiB of gradients from the others per optimizer" in replicated
    assert "in every micro-batch 13.32 GiB of weights and 77.0 MiB of gradients" in sharded


def test_a_plan_says_where_fused_kernels_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("lora")
    there = {"liger-kernel": "0.8.5"}
    monkeypatch.setattr(memory_config, "installed", there.get)
    assert notes_on_kernels(spec) == []
    there.clear()
    (note,) = notes_on_kernels(spec)
    assert "liger-kernel is not installed" in note and "pip install" in note
    assert notes_on_kernels(spec_of("lora", "model.kernels=torch")) == []
