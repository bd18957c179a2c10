"""Model FLOPs, which MFU is measured with, against what torch counts in a real step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.type_cell import write_tiny
from benchmarks.type_configs import tiny_config
from engine.model.flops import AttentionFlops, StepFlops, step_flops
from engine.model.loaded import LoadedModel
from engine.model.loss import make_loss
from tests.model.samples import FAMILIES, MIXTURES, batch_of, cpu, load, run_spec, write_model
from tests.present import present

ROWS, LENGTH = 2, 8
WITH_RECURRENCES = {"qwen3_next", "minimax"}  # which are not counted
EVERY_FAMILY = sorted({**FAMILIES, **MIXTURES}.keys() - WITH_RECURRENCES)


def family(folder: Path, name: str, **options: Any) -> LoadedModel:
    path = write_model(folder / name, name, **{**FAMILIES, **MIXTURES}[name])
    # torch counts eager attention; it has no formula for the kernel that computes attention on a CPU.
    train = {"gradient_checkpointing": False}
    loaded = load(run_spec(str(path), attention="eager", train=train, **options))
    if name in MIXTURES:
        loaded.base.set_experts_implementation("eager")  # nor for grouped products
    return loaded


def added_in_place(_sum: Any, left: Any, right: Any, **_: Any) -> int:
    """torch's counter has a formula for addmm, but none for addmm_, which adapters use."""
    return int(2 * left[0] * left[1] * right[1])


def counted(loaded: LoadedModel) -> tuple[float, int]:
    """FLOPs of one forward and backward pass: ours, and by torch's counter."""
    batch = batch_of(ROWS, LENGTH, masked=2)
    present(batch.attention_mask_BS).fill_(1)
    loss = make_loss(loaded, implementation="plain", label_smoothing=0.0, chunk_tokens=None, device=cpu())
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_in_place}) as counter:
        loss(batch).backward()
    return present(step_flops(loaded)).of(np.full(ROWS, LENGTH), batch.target_tokens), int(counter.get_total_flops())


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_full_fine_tuning_has_the_flops_that_torch_counts(tmp_path: Path, name: str) -> None:
    ours, torchs = counted(family(tmp_path, name, method={"kind": "full"}))
    assert ours == torchs


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_lora_has_the_flops_that_torch_counts(tmp_path: Path, name: str) -> None:
    loaded = family(tmp_path, name, method={"rank": 4})
    ours, torchs = counted(loaded)
    first = sum(p.numel() for path, p in loaded.base.named_parameters() if ".0." in path and p.dim() == 2)
    # What reads the first layer's input beside its first projection is counted as if that input had a gradient.
    assert 0 <= ours - torchs <= 2 * first * ROWS * LENGTH


def test_layers_with_heads_of_their_own_have_the_flops_that_torch_counts(tmp_path: Path) -> None:
    """But for the sparse attention of dots3's other layers, which is counted as if it were full."""
    path = write_tiny(tiny_config("dots3_note_text"), tmp_path / "model")
    train = {"gradient_checkpointing": False}
    loaded = load(run_spec(str(path), attention="eager", train=train, method={"kind": "full"}))
    loaded.base.set_experts_implementation("eager")
    ours, torchs = counted(loaded)
    assert ours == pytest.approx(torchs, rel=1e-3)


def test_frozen_layers_below_what_learns_have_no_backward_pass(tmp_path: Path) -> None:
    ours, torchs = counted(family(tmp_path, "llama", method={"kind": "full", "train_only": ["model.layers.1.mlp"]}))
    up = 32 * 48  # reads the same input as the first projection that learns
    assert ours - torchs == 2 * up * ROWS * LENGTH


def test_adapters_on_experts_count_for_the_experts_in_use(tmp_path: Path) -> None:
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    few, more = (
        present(step_flops(family(tmp_path / str(rank), "mixtral", method={"targets": targets, "rank": rank})))
        for rank in (2, 3)
    )
    layers, used, hidden, inner, products = 2, 2, 32, 48, 3
    one_rank = layers * used * ((hidden + 2 * inner) + (inner + hidden))
    assert more.per_token - few.per_token == pytest.approx(
        2 * products * one_rank, rel=0.1
    )  # first A: no input gradient


class PackedLinear(nn.Linear):
    """Half as many bytes as weights, in one column, as bitsandbytes' 4-bit layers have them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        packed = torch.zeros(inputs * outputs // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)


def test_packed_weights_count_as_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    loaded = family(tmp_path, "llama", method={"rank": 4, "targets": ["q_proj"]})
    whole = step_flops(loaded)
    for layer in loaded.base.model.layers:
        layer.mlp.down_proj = PackedLinear(48, 32)
    assert step_flops(loaded) == whole


def test_a_window_bounds_the_pairs_and_lengths_are_of_documents() -> None:
    flops = StepFlops(10.0, 0.0, (AttentionFlops(1.0, None), AttentionFlops(1.0, 4)))
    assert flops.of(np.array([8, 2]), targets=0) == 10 * 10 + (64 + 4) + (8 * 4 + 2 * 2)
