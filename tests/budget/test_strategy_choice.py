"""strategy = "auto": forty runs, with what each should use; the reason is in the plan, in run.toml and in a notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.budget.advise import parallel as strategy
from engine.budget.advise.parallel import Settled, settle_parallel
from engine.budget.advise.plan import make_plan
from engine.budget.predict.shards import can_shard
from engine.config.load import dump_run_spec, load_run_spec, override, resolve

Q05, Q3, Q7, Q14, Q32 = (f"Qwen/Qwen2.5-{size}B" for size in ("0.5", "3", "7", "14", "32"))
L8, L70, MIX, G27 = (
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "mistralai/Mixtral-8x7B-v0.1", "google/gemma-2-27b"
)  # fmt: skip
WHOLE, NONE, NF4 = "fits each device", "it does not fit if replicated", "nf4"
SMALLER = "smaller micro-batch or remedies if replicated"
R, S = "replicated", "sharded"

needs_shards = pytest.mark.skipif(not can_shard(), reason="this torch is too old for shards: auto never chooses them")

TABLE: list[tuple[str, str, str, str, str, str]] = [
    # profile, more overrides, recipe, model, what is used, a part of the reason
    ("4xh100", "", "lora", Q05, R, WHOLE), ("4xh100", "", "lora", Q7, R, WHOLE), ("4xh100", "", "lora", L8, R, WHOLE),
    ("4xh100", "", "lora", Q14, R, WHOLE), ("4xh100", "", "lora", Q32, R, WHOLE), ("4xh100", "", "lora", G27, R, WHOLE),
    ("4xh100", "", "lora", L70, S, NONE), ("4xh100", "", "lora", MIX, S, NONE),
    ("4xh100", "", "full", Q05, R, WHOLE), ("4xh100", "", "full", Q3, R, WHOLE),
    ("4xh100", "", "full", Q7, S, SMALLER), ("4xh100", "", "full", Q14, S, SMALLER),
    ("4xh100", "", "full", Q32, S, NONE), ("4xh100", "", "full", L70, S, "it does not fit if sharded"),
    ("4xh100", "", "qlora", Q7, R, NF4), ("4xh100", "", "qlora", L70, R, NF4),
    ("4xh200", "", "lora", Q32, R, WHOLE), ("4xh200", "", "lora", MIX, R, WHOLE),
    ("4xh200", "", "lora", L70, S, "if replicated"),
    ("4xh200", "", "full", Q7, R, WHOLE), ("4xh200", "", "full", Q14, S, SMALLER), ("4xh200", "", "full", L70, S, NONE),
    ("24gb", "device.count=2", "lora", Q7, R, WHOLE), ("24gb", "device.count=2", "lora", Q14, S, NONE),
    ("24gb", "device.count=2", "full", Q05, R, WHOLE), ("24gb", "device.count=2", "full", Q3, R, "ranks exchange less"),
    ("24gb", "device.count=2", "qlora", Q14, R, NF4), ("24gb", "device.count=2", "lora", L70, S, NONE),
    ("48gb", "device.count=8", "lora", Q14, R, WHOLE), ("48gb", "device.count=8", "lora", Q32, S, NONE),
    ("48gb", "device.count=8", "full", Q3, R, WHOLE), ("48gb", "device.count=8", "full", Q7, S, "if replicated"),
    ("80gb", "nodes.count=4", "full", Q3, R, WHOLE), ("80gb", "nodes.count=16", "full", L70, S, NONE),
    ("4xh100", "train.optimizer=adafactor", "full", Q7, R, "adafactor"),
    ("4xh100", "train.optimizer=adamw_8bit", "full", Q7, R, "adamw_8bit"),
    ("4xh100", "train.micro_batch=1", "lora", L70, S, NONE),
    ("4xh100", "parallel.sequence=auto data.max_length=262144", "lora", L8, R, WHOLE),
    ("4xh100", "parallel.sequence=4", "full", "Qwen/Qwen3-4B", R, WHOLE),
    ("4xh100", "", "lora", "nobody/unheard-of", S, "no memory plan"),
]  # fmt: skip


def settled(profile: str, recipe: str, *overrides: str) -> Settled:
    # What may be offloaded must not depend on the memory of the machine that tests.
    return settle_parallel(resolve(profile, recipe, ["device.host_memory_gib=1024", *overrides]).spec)


def test_the_table_has_forty_cases() -> None:
    assert len(TABLE) == len(set(TABLE)) == 40


@needs_shards
@pytest.mark.parametrize(("profile", "more", "recipe", "model", "used", "reason"), TABLE)
def test_replicated_where_it_fits_else_sharded(
    profile: str, more: str, recipe: str, model: str, used: str, reason: str
) -> None:
    spec, notices = settled(profile, recipe, f"model.id={model}", *more.split())
    assert spec.profile.parallel.strategy == used
    assert reason in spec.provenance.parallel and reason in notices[0]


@needs_shards
def test_the_plan_says_why_and_run_toml_keeps_the_decision(tmp_path: Path) -> None:
    spec, _ = settled("4xh100", "full", f"model.id={Q7}")
    assert make_plan(spec).as_json()["parallel"] == spec.provenance.parallel
    (tmp_path / "run.toml").write_text(dump_run_spec(spec))
    again = override(load_run_spec(tmp_path / "run.toml"), ["train.max_steps=3"]).spec
    assert again.profile.parallel.strategy == "sharded" and again.provenance.parallel == spec.provenance.parallel


def test_a_recipe_may_ask_for_auto_and_one_device_is_single() -> None:
    assert resolve("80gb", "lora").spec.profile.parallel.strategy == "single"
    fixed = resolve("4xh100", "lora", ["parallel.strategy=sharded", f"model.id={Q7}"]).spec
    assert settle_parallel(fixed).spec == fixed
    parallel = fixed.recipe.parallel.model_copy(update={"strategy": "auto"})
    asks = fixed.model_copy(update={"recipe": fixed.recipe.model_copy(update={"parallel": parallel})})
    once = settle_parallel(asks).spec
    assert once.profile.parallel.strategy == "replicated" and settle_parallel(once).spec == once


def test_a_torch_without_shards_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "can_shard", lambda: False)
    spec, (notice,) = settled("4xh100", "lora", f"model.id={L70}")
    assert spec.profile.parallel.strategy == "replicated" and "need torch 2.13" in notice
