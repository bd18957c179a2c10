"""What DeepSpeed is not asked to do, what a plan says of it, and a run without the package. Runs everywhere."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.budget.advice import advise
from engine.budget.lookup import find_architecture
from engine.budget.plan import make_plan, remedies
from engine.budget.preflight import refuse_unsafe, warnings_of
from engine.errors import EnvironmentProblem, SpecError, UsageError
from engine.launch.create_run import new_run
from engine.spec.load import resolve
from engine.spec.schema.run import RunSpec

DENSE = "model.id=Qwen/Qwen2.5-7B"
UNDER = "parallel.strategy=deepspeed"


def spec_of(recipe: str, *sets: str, profile: str = "4xh100") -> RunSpec:
    return resolve(profile, recipe, [DENSE, UNDER, *sets]).spec


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (['model.dtype="float16"'], ["model.dtype", "float32"]),
        (["device.compute_capability=7.5"], ["model.dtype", '"auto"', "float32"]),
        (['model.quantize="nf4"'], ["model.quantize", '"none"']),
        (["method.dora=true"], ["method.dora", "false"]),
        (['method.also_train=["**.embed_tokens"]'], ["method.also_train", "adapters alone"]),
        (['train.optimizer="adamw_8bit"'], ["train.optimizer", '"adamw" or "sgd"']),
        (['train.optimizer="adafactor"'], ["train.optimizer", '"adamw" or "sgd"']),
        (["train.optimizer_offload=true"], ["train.optimizer_offload", "false"]),
        (["train.activation_offload=true"], ["train.activation_offload", "false"]),
        (["data.valid_fraction=0.1", "eval.samples=2"], ["eval.samples", 'parallel.shard = "gradients"']),
        (["parallel.sequence=2"], ["parallel.sequence", "1 is allowed"]),
    ],
    ids=lambda value: value[-1].partition("=")[0] if "=" in value[-1] else "",
)
def test_what_it_does_not_do_is_refused_with_what_would(change: list[str], words: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        spec_of("lora", *change)
    for word in (*words, "deepspeed", "sharded"):
        assert word in str(refused.value)


def test_answers_are_generated_where_every_rank_has_whole_weights() -> None:
    spec_of("lora", "data.valid_fraction=0.1", "eval.samples=2", "parallel.shard=gradients")


@pytest.mark.parametrize("model", ["mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen2-VL-7B-Instruct"])
def test_models_with_parts_that_may_see_no_token_are_refused(model: str) -> None:
    with pytest.raises(UsageError, match=r"experts|vision tower") as refused:
        refuse_unsafe(resolve("4xh100", "lora", [f"model.id={model}", UNDER]).spec)
    assert "sharded" in refused.value.fix


def test_a_plan_warns_that_memory_running_out_is_a_restart() -> None:
    spec = spec_of("full")
    said = "\n".join(warnings_of(find_architecture(spec), spec))
    assert "approximation" in said
    assert "start again from the last checkpoint" in said
    assert "nodes.max_restarts" in said


def test_a_plan_counts_the_fp32_copy_fp32_gradients_and_fp32_state() -> None:
    """In bf16: 4 bytes of state for a weight in shards, 8 and 4 for the copy here; gradients of 4 bytes, not 2."""
    ours, shards = (
        make_plan(resolve("4xh100", "full", [DENSE, f"parallel.strategy={strategy}"]).spec)
        .prediction.phases["optimizer_step"]
        for strategy in ("deepspeed", "sharded")
    )
    assert ours["weights"] == shards["weights"]
    assert ours["optimizer"] == pytest.approx(3 * shards["optimizer"], rel=1e-3)
    assert ours["gradients"] == pytest.approx(2 * shards["gradients"], rel=1e-3)


def test_no_remedy_is_offered_that_would_be_refused() -> None:
    spec = spec_of("full", "model.id=Qwen/Qwen2.5-14B", "device.count=2", "train.gradient_checkpointing=false")
    tried = [remedied.recipe.train for remedied in remedies(spec)]
    assert any(train.gradient_checkpointing for train in tried)
    assert not any(train.activation_offload or train.optimizer_offload for train in tried)
    keys = {key for suggestion in advise(spec).suggestions for key in suggestion.changes}
    assert keys
    assert not keys & {"train.activation_offload", "train.optimizer_offload", "train.optimizer", "model.quantize"}


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="deepspeed is installed here")
def test_without_the_package_no_run_is_made_and_the_way_to_get_it_is_named(tmp_path: Path) -> None:
    spec = resolve("demo-2", "demo", [UNDER, "eval.samples=0", 'eval.metrics=["loss"]']).spec
    with pytest.raises(EnvironmentProblem) as missing:
        new_run(spec, tmp_path)
    assert missing.value.exit_code == 6
    assert "pip install 'tunedeck[deepspeed]'" in missing.value.fix
    assert not list(tmp_path.iterdir())
