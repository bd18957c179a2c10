"""Tiled MLP: blocks are found by asking, pieces give the results of the whole, memory is what the plan says, and a
block that looks at other tokens is computed whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from engine.architecture.lookup import find_architecture, find_facts
from engine.budget.advise.plan import PLANNED_TILES, make_plan
from engine.budget.advise.preflight import warnings_of
from engine.budget.predict.prediction import predict
from engine.config.load import resolve
from engine.extras.simulate.step import simulate_step
from engine.model.dropout import keyed, keyed_dropouts
from engine.model.head import find_head
from engine.model.loaded import LoadedModel, tile_mlps
from engine.model.loss import LossFunction
from engine.train.step.computation import StepComputation
from tests.budget.metered_step import GEMMA2, GPT2, LLAMA, MIXTRAL, PHI3, folder_of, measured_step
from tests.budget.metered_step import run_spec as metered_spec
from tests.model.samples import FAMILIES, MIXTURES, batch_of, disturb, load, run_spec, write_model
from tests.train.proofs.proved import proved, small_setup

LORA: dict[str, Any] = {"kind": "lora", "rank": 4}
FULL: dict[str, Any] = {"kind": "full"}


def tiled(folder: Path, family: str, method: dict[str, Any], **train: Any) -> LoadedModel:
    spec = run_spec(str(write_model(folder, family)), method=method, train=train)
    loaded = load(spec)
    tile_mlps(loaded, spec.recipe)
    disturb(loaded)
    return loaded


def loss_and_gradients(loaded: LoadedModel) -> dict[str, Tensor]:
    batch, loss = batch_of(rows=3, length=14), LossFunction(loaded, find_head(loaded.base), "chunked", 0.0, 16)
    loaded.model.zero_grad(set_to_none=True)
    with keyed(keyed_dropouts(loaded.model), seed=0, step=1, sample_ids=batch.sample_ids):
        value = loss.minimised(loss.terms(batch).share_of(batch.target_tokens, 42))
        value.backward()
    gradients = {name: each.grad.clone() for name, each in loaded.trainable() if each.grad is not None}
    return {"loss": value.detach(), **gradients}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MIXTURES])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_pieces_give_the_loss_and_gradients_of_the_whole(tmp_path: Path, family: str, checkpointing: bool) -> None:
    method = FULL if family in ("gpt2", "llama") else {**LORA, "dropout": 0.1}
    loaded = tiled(tmp_path, family, method, gradient_checkpointing=checkpointing)
    assert loaded.tiles is not None and len(loaded.tiles.blocks) == loaded.layers
    whole = loss_and_gradients(loaded)
    for count in (2, 4, 99):
        loaded.set_mlp_tiles(count)
        pieces = loss_and_gradients(loaded)
        assert pieces.keys() == whole.keys()
        for name, expected in whole.items():
            assert torch.allclose(pieces[name], expected, rtol=1e-4, atol=1e-6), (count, name)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_blocks_that_count_the_tokens_of_experts_are_computed_whole(tmp_path: Path, family: str) -> None:
    spec = run_spec(str(write_model(tmp_path, family, **MIXTURES[family])), method=LORA, train={"mlp_tiles": 4})
    loaded = load(spec)
    tile_mlps(loaded, spec.recipe)
    assert loaded.tiles is None and "computed whole" in loaded.notices[-1]


def test_a_recomputed_layer_computes_its_block_no_more_often_than_without_pieces(tmp_path: Path) -> None:
    loaded = tiled(tmp_path, "qwen2", LORA, gradient_checkpointing=True)
    calls, block = [0], loaded.base.model.layers[0].mlp.down_proj

    def count(*_: object) -> None:
        calls[0] += 1

    block.register_forward_pre_hook(count)  # recomputation ends inside the last one
    loss_and_gradients(loaded)
    whole, calls[0] = calls[0], 0
    loaded.set_mlp_tiles(7)
    loss_and_gradients(loaded)
    assert whole == 2 and calls[0] == 7 * whole


def test_evaluation_is_computed_in_pieces_and_generation_token_by_token_is_not(tmp_path: Path) -> None:
    loaded = tiled(tmp_path, "qwen2", LORA, mlp_tiles=4)
    longest: list[int] = []
    block = loaded.base.model.layers[0].mlp.down_proj
    block.register_forward_hook(lambda module, given, made: longest.append(given[0].shape[1]))
    loaded.model.eval()
    with torch.no_grad():
        loaded.model(input_ids=torch.zeros((2, 14), dtype=torch.int64))
        assert longest == [4, 4, 4, 2]
        loaded.model(input_ids=torch.zeros((2, 1), dtype=torch.int64))
    assert longest[4:] == [1]


def looks_back(block: Any, x: Tensor) -> Tensor:
    output: Tensor = Qwen2MLP.forward(block, x + x.roll(1, dims=1))
    return output


def test_a_block_that_looks_at_other_tokens_is_found_at_start(tmp_path: Path) -> None:
    with small_setup(tmp_path, train={"mlp_tiles": 4}) as setup:
        loaded = setup.context.loaded
        assert proved(setup, tmp_path)["tiled_mlp"].passed
        assert loaded.mlp_tiles == 4
        for layer in loaded.base.model.layers:
            layer.mlp.__class__ = type("LooksBack", (Qwen2MLP,), {"forward": looks_back})
        found = proved(setup, tmp_path)["tiled_mlp"]
        assert found.passed is False and "computed whole" in found.fallback
        assert (loaded.tiles, loaded.mlp_tiles) == (None, 1)
        assert "forward" not in loaded.base.model.layers[0].mlp.__dict__
        StepComputation(setup.context)  # goes on without


@pytest.mark.parametrize(
    ("config", "method", "checkpointing"),
    [(LLAMA, {"rank": 8}, True), (LLAMA, FULL, False), (GEMMA2, {"rank": 8, "dropout": 0.1}, True),
     (PHI3, {"rank": 8}, False), (GPT2, {"rank": 8}, True)],
    ids=["llama-lora", "llama-full-kept", "gemma2-dropout", "phi3-kept", "gpt2"],
)  # fmt: skip
def test_the_plan_and_the_simulation_are_the_peak_of_a_real_step(
    config: dict[str, Any], method: dict[str, Any], checkpointing: bool, tmp_path: Path
) -> None:
    wide = "n_inner" if config is GPT2 else "intermediate_size"
    folder = folder_of({**config, wide: 2048}, tmp_path)
    dtype = "float32" if config is GPT2 else "bfloat16"
    train = {"batch_size": 4, "gradient_checkpointing": checkpointing}
    peaks = []
    for tiles in (1, 4):
        spec = metered_spec(folder, method=method, model={"dtype": dtype}, train={**train, "mlp_tiles": tiles})
        predicted = predict(find_architecture(spec), spec, rows=4, length=256).peak_bytes
        assert predicted == pytest.approx(measured_step(spec, 4, 256)[1], rel=0.005)
        assert predicted == pytest.approx(simulate_step(spec, rows=4, length=256).peak_bytes, rel=0.005)
        peaks.append(predicted)
    assert peaks[1] < 0.95 * peaks[0]


LONG = ["model.id=meta-llama/Llama-3.1-8B", "data.max_length=131072", "model.kernels=torch"]


def test_a_long_sequence_fits_in_pieces_before_anything_moves_to_the_host() -> None:
    plan = make_plan(resolve("48gb", "lora", [*LONG, "data.max_length=65536", "device.memory_gib=44"]).spec)
    assert plan.verdict == "fits_smaller"
    assert plan.remedies["train.mlp_tiles"] == PLANNED_TILES and "train.activation_offload" not in plan.remedies


def test_a_mixture_is_not_offered_pieces_and_is_told_that_they_change_nothing(tmp_path: Path) -> None:
    spec = metered_spec(
        folder_of(MIXTRAL, tmp_path), train={"mlp_tiles": 4}, device={"kind": "metered", "memory_gib": 0.01}
    )
    assert "train.mlp_tiles" not in make_plan(spec).remedies
    assert any("mixture of experts" in each for each in warnings_of(find_facts(spec.recipe.model), spec))
