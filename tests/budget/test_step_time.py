"""The model of time: what takes longer is predicted to take longer, plans tell what it comes to, and earlier runs on
the machine correct it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.architecture.lookup import find_architecture
from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.plan import Plan, considered, make_plan
from engine.budget.predict.pace import LEAST_MODELS, pace_file, record_pace
from engine.budget.predict.prediction import Predictor
from engine.budget.predict.step_time import StepTime
from engine.commands.plan_text import time_sentence, why_lines
from engine.config.files.machine import installed
from engine.config.load import resolve
from engine.config.schema.run import RunSpec
from tests.present import present

LLAMA_8B = ["model.id=meta-llama/Llama-3.1-8B", "data.max_length=4096", "train.batch_size=16", "train.micro_batch=2"]
LLAMA_8B += ["model.kernels=torch"]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "not made yet" / "state"))


def spec_of(*sets: str, profile: str = "80gb", recipe: str = "lora") -> RunSpec:
    return resolve(profile, recipe, [*LLAMA_8B, *sets]).spec


def time_of(*sets: str, profile: str = "80gb") -> StepTime:
    spec = spec_of(*sets, profile=profile)
    return StepTime.of(Predictor(find_architecture(spec), spec))


def test_more_work_takes_longer() -> None:
    time = time_of()
    steps = [time.step(2, 4096, layers) for layers in (0, 1, 16, 32)]
    assert steps == sorted(steps) and steps[1] > steps[0]
    assert steps[3] / steps[0] == pytest.approx(1.4, abs=0.15), "a forward pass of three, without weights' gradients"
    assert time.step(1, 4096, 0) > time.step(2, 4096, 0), "twice as many micro-batches"
    assert time.step(2, 8192, 0) > 2 * time.step(2, 4096, 0), "attention is quadratic"
    assert time_of(profile="48gb").step(2, 4096, 0) > steps[0], "a slower card"
    assert time_of("method.kind=full").step(2, 4096, 0) > steps[0], "gradients of all weights"
    assert time_of("train.activation_offload=true").step(2, 4096, 0) > steps[0], "copies over PCIe"


def test_a_few_tokens_take_as_long_as_reading_the_weights() -> None:
    """15 GiB of weights are read twice, at 3,350 GB/s and with 2 ms for the micro-batch itself."""
    seconds = sum(time_of().micro_batch(1, 1, 0)._replace(waiting=0.0))
    assert seconds == pytest.approx(2 * 16.06e9 / 3.35e12 + 2e-3, rel=0.1)


FLASH = "model.attention=sdpa"
"""Torch's flash kernel, with which the speeds were measured."""
CUDNN = "model.attention=auto"
MEASURED = {
    ("torch", "false", FLASH): 11_463,
    ("torch", "true", FLASH): 8_210,
    ("auto", "false", FLASH): 14_155,
    ("auto", "true", FLASH): 10_017,
    ("auto", "false", CUDNN): 15_167,
}
"""Tokens per second on an H100, by kernels, recomputation and attention (benchmarks/results/gpu.json), of two
micro-batches."""


@pytest.mark.parametrize(("kernels", "recomputes", "attention"), MEASURED)
def test_the_speed_is_what_an_h100_measured(kernels: str, recomputes: str, attention: str) -> None:
    if kernels == "auto" and not installed("liger-kernel"):
        pytest.skip("fused kernels are liger-kernel's")
    sets = (f"model.kernels={kernels}", f"train.gradient_checkpointing={recomputes}", "train.batch_size=4", attention)
    time = present(make_plan(spec_of(*sets)).time)
    assert time.tokens_per_second == pytest.approx(MEASURED[kernels, recomputes, attention], rel=0.02)


def test_attention_takes_what_its_kernel_takes() -> None:
    """3.7 and 2.5 ms a layer on an H100, by torch's flash kernel and by cuDNN's, which deterministic runs leave out."""
    by_flash, by_cudnn, repeated = (time_of(each) for each in (FLASH, CUDNN, "train.deterministic=true"))
    faster = by_flash.micro_batch(2, 4096, 0).products - by_cudnn.micro_batch(2, 4096, 0).products
    assert faster == pytest.approx(32 * 1.2e-3, rel=0.05)
    assert repeated.micro_batch(2, 4096, 0) == by_flash.micro_batch(2, 4096, 0)
    older = [time_of(each, profile="48gb").micro_batch(2, 4096, 0) for each in (FLASH, CUDNN)]
    assert older[0] == older[1], "an Ada card has no use of it"


def test_offloads_take_what_the_link_to_the_host_takes() -> None:
    """On an H100 1.9 s of copies for an 8B LoRA of two micro-batches of 4,096 tokens, and 0.4 s for 15 GB of optimizer
    state, which goes both ways at once."""
    offload = ("train.activation_offload=true", "train.gradient_checkpointing=false", "train.batch_size=2")
    activations = time_of(*offload, "model.kernels=auto")
    if installed("liger-kernel"):  # fused kernels save less
        assert activations.step(1, 4096, 0) == pytest.approx(1.9, rel=0.05)
    full = ("model.id=Qwen/Qwen2.5-1.5B", "method.kind=full", "train.batch_size=4")
    offloaded = time_of(*full, "train.optimizer_offload=true")
    assert offloaded.offloaded_state_bytes == pytest.approx(10 * 1.54e9, rel=0.01), "and remainders"
    assert offloaded.update == pytest.approx(0.4, abs=0.05) and time_of(*full).update < 0.05
    on_cpu = [resolve("demo", "demo", [f"train.activation_offload={each}"]).spec for each in ("true", "false")]
    slow, kept = (StepTime.of(Predictor(find_architecture(spec), spec)).step(28, 41, 0) for spec in on_cpu)
    assert slow / kept == pytest.approx(1.18, abs=0.08), "279 and 236 ms a step, of the demo"
    older = time_of(*offload, "model.kernels=auto", profile="48gb")
    assert older.micro_batch(1, 4096, 0).waiting > activations.micro_batch(1, 4096, 0).waiting, "PCIe 4"


def test_an_8b_model_on_one_card_of_80_gb() -> None:
    spec = spec_of("train.max_steps=1000", "device.price_per_hour=3.0")
    plan = make_plan(spec)
    time = present(plan.time)
    assert plan.recomputed_layers == 0
    assert time.step_seconds == pytest.approx(sum(time.parts.values()))
    assert present(time.hours) == pytest.approx(1000 * time.step_seconds / 3600)
    assert present(time.cost) == pytest.approx(3.0 * present(time.hours))
    sentence = time_sentence(time, plan.length, spec)
    assert "989.4 TFLOP/s, 3350 GB/s); not calibrated on this machine" in sentence
    table = why_lines(considered(spec, plan), plan, spec)
    assert [line for line in table if line.startswith("*")] == [table[3]], "the planned setting is the fastest"
    assert "0 of 32    62.59 GiB" in table[3]


def test_runs_on_this_machine_correct_the_prediction() -> None:
    spec = spec_of()
    before = present(make_plan(spec).time)
    for factor in (1.2, 1.3, 1.5):
        record_pace(spec, factor)
    corrected = present(make_plan(spec).time)
    assert (corrected.basis, corrected.runs, corrected.factor) == ("same_model", 3, 1.3)
    assert corrected.step_seconds == pytest.approx(1.3 * before.step_seconds)
    assert corrected.spread == pytest.approx(1.5 / 1.3 - 1)
    assert "calibrated with 3 earlier runs of this model on this machine, which differ by up to 15 %" in time_sentence(
        corrected, 4096, spec
    )
    other = spec_of("model.id=Qwen/Qwen2.5-7B")
    assert present(make_plan(other).time).basis == "profile", "one other model tells little"
    for model in ["Qwen/Qwen3-4B", "Qwen/Qwen3-8B"][: LEAST_MODELS - 1]:
        record_pace(spec_of(f"model.id={model}"), 1.5)
    assert present(make_plan(other).time).basis == "other_models"
    pace_file().write_text("{}")
    assert present(make_plan(spec).time).basis == "profile"


@pytest.mark.parametrize("runs", [[], [0.0], [1.2, -1.0]])
def test_an_entry_without_sound_runs_does_not_cost_the_others(runs: list[float]) -> None:
    spec = spec_of()
    record_pace(spec, 1.3)
    kept = json.loads(pace_file().read_text("utf-8"))
    kept["entries"].insert(0, {**kept["entries"][0], "model": "another", "runs": runs})
    pace_file().write_text(json.dumps(kept))
    found = present(make_plan(spec).time)
    assert (found.basis, found.factor) == ("same_model", 1.3)


def test_nothing_is_told_where_nothing_is_known() -> None:
    assert timed("demo", "demo").time is None, "no datasheet"
    several = settle_parallel(resolve("4xh100", "lora", LLAMA_8B).spec).spec
    assert make_plan(several).time is None, "what several devices exchange"
    record_pace(several, 2.0)
    assert present(make_plan(several).time).basis == "same_model"


def timed(profile: str, recipe: str) -> Plan:
    return make_plan(resolve(profile, recipe, []).spec)
