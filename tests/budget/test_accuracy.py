"""Compares predictions with real steps on the metered device, for all families and ways to train.

`python -m benchmarks.budget_error` prints the whole table. Here every way is tested with two families, and every family
with the two most common ways.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.architecture.lookup import find_architecture
from engine.budget.predict.prediction import predict
from tests.budget.budget_cases import EXPERTS, FAMILIES, FULL, LORA, WAYS, applies, error
from tests.budget.metered_step import PHI3, QWEN2, folder_of, measured_step, run_spec

pytestmark = pytest.mark.usefixtures("quick_half_products")

COMMON = ("lora", "full")
CELLS = [(family, way) for way in COMMON for family in FAMILIES] + [("gpt_oss", "full fp16")]
CELLS += [
    (family, way)
    for number, way in enumerate(WAYS)
    for place, family in enumerate(FAMILIES)
    if way not in COMMON and (place - 2 * number) % len(FAMILIES) < 1 and applies(family, way)
]


@pytest.mark.parametrize(("family", "way"), CELLS, ids=str)
def test_peak_is_predicted(family: str, way: str, tmp_path: Path) -> None:
    assert -0.005 <= error(family, way, tmp_path) <= 0.01


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_rows_so_long_that_scores_decide_are_predicted(family: str, tmp_path: Path) -> None:
    assert -0.005 <= error(family, "lora, eager", tmp_path, rows=2, length=600) <= 0.01


DORA_DROPOUT = {"rank": 8, "dora": True, "dropout": 0.1}
"""Each layer saves a copy of its weight, whose size does not depend on the tokens."""


@pytest.mark.parametrize(
    ("family", "method"),
    [("qwen2", {}), ("llama", {}), ("mixtral", {}), ("llama", DORA_DROPOUT)],
    ids=["qwen2", "llama", "mixtral", "llama, dora, dropout"],
)
def test_activations_that_wait_on_the_host_come_back_for_one_operation_at_a_time(
    family: str, method: dict[str, Any], tmp_path: Path
) -> None:
    """Checkpointing is off. Families with small tensors or masks, which are not offloaded, have larger errors and are
    not tested here."""

    train = {"gradient_checkpointing": False, "activation_offload": True, "batch_size": 4}
    folder = folder_of(FAMILIES[family], tmp_path)
    spec = run_spec(folder, method={"rank": 8} | method, model={"dtype": "bfloat16"}, train=train)
    predicted = predict(find_architecture(spec), spec, rows=2, length=200).peak_bytes
    assert -0.005 <= predicted / measured_step(spec, 2, 200, 2)[1] - 1 <= 0.01
    kept = spec.recipe.train.model_copy(update={"activation_offload": False})
    there = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"train": kept})})
    assert predicted < 0.8 * predict(find_architecture(there), there, rows=2, length=200).peak_bytes


def test_every_way_and_every_family_is_met() -> None:
    assert {way for _, way in CELLS} == {way for way in WAYS if any(applies(family, way) for family in FAMILIES)}
    assert {family for family, _ in CELLS} == set(FAMILIES)


def test_several_chunks_of_the_loss_are_predicted(tmp_path: Path) -> None:

    wide = {**QWEN2, "vocab_size": 60_000, "num_hidden_layers": 1, "tie_word_embeddings": False}
    for also_train in ([], ["lm_head"]):
        spec = run_spec(
            folder_of(wide, tmp_path / "wide"), method={"rank": 4, "also_train": also_train}, train={"batch_size": 4}
        )
        predicted = predict(find_architecture(spec), spec, rows=4, length=200).peak_bytes
        assert -0.005 <= predicted / measured_step(spec, 4, 200)[1] - 1 <= 0.02


@pytest.mark.parametrize("rows", [1, 2])
def test_phi3s_eager_attention_keeps_the_joint_projection_of_a_single_sequence(rows: int, tmp_path: Path) -> None:
    """For several sequences Phi-3's attention saves a copy of the values instead, if there are as many value heads as
    query heads."""
    spec = run_spec(
        folder_of({**PHI3, "num_key_value_heads": PHI3["num_attention_heads"]}, tmp_path),
        method={"rank": 8}, model={"dtype": "float32", "attention": "eager"},
        train={"gradient_checkpointing": False, "batch_size": 2 * rows},
    )  # fmt: skip
    predicted = predict(find_architecture(spec), spec, rows=rows, length=128 // rows).peak_bytes
    assert predicted == pytest.approx(measured_step(spec, rows, 128 // rows, 2)[1], rel=0.002)


def test_a_first_layer_with_large_adapters_and_few_tokens_is_what_the_metered_device_counts(tmp_path: Path) -> None:
    train = {"gradient_checkpointing": True, "batch_size": 1}
    spec = run_spec(folder_of(QWEN2, tmp_path), method={"rank": 512}, model={"dtype": "bfloat16"}, train=train)
    predicted = predict(find_architecture(spec), spec, rows=1, length=6).peak_bytes
    assert predicted == pytest.approx(measured_step(spec, 1, 6)[1], rel=0.005)


@pytest.mark.parametrize("family", sorted(EXPERTS))
@pytest.mark.parametrize("method", [LORA, FULL], ids=["lora", "full"])
def test_a_router_that_learns_is_planned(tmp_path: Path, family: str, method: dict[str, Any]) -> None:
    folder = folder_of(EXPERTS[family], tmp_path)
    moe = {"freeze_router": False}
    spec = run_spec(folder, model={"dtype": "bfloat16"}, method=method, moe=moe, train={"batch_size": 2})
    predicted = predict(find_architecture(spec), spec, rows=2, length=200).peak_bytes
    assert predicted == pytest.approx(measured_step(spec, 2, 200, 1)[1], rel=0.002)
