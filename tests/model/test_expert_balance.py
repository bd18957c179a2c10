"""The auxiliary loss of mixtures: its gradient does not depend on the split, and equals a plain reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import UsageError
from engine.model.expert_balance import TOP_K_FAMILIES, expert_balance
from engine.model.loaded import LoadedModel
from engine.model.loss import LossFunction, loss_of
from tests.model.auxiliary_loss import gradients, ragged, reference
from tests.model.samples import MIXTURES, cpu, disturb, load, run_spec, write_model

FULL = {"method": {"kind": "full"}}


def loaded_with_loss(folder: Path, family: str, **options: Any) -> tuple[LoadedModel, LossFunction]:
    spec = run_spec(str(write_model(folder / family, family, **MIXTURES.get(family, {}))), **options)
    loaded = load(spec)
    disturb(loaded)
    return loaded, loss_of(spec.recipe, loaded, cpu())


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_any_split_gives_the_reference_s_gradient(tmp_path: Path, family: str, checkpointing: bool) -> None:
    moe, train = {"aux_loss_weight": 2.0}, {"gradient_checkpointing": checkpointing}
    loaded, loss = loaded_with_loss(tmp_path, family, method=FULL["method"], moe=moe, train=train)
    batch = ragged()
    by_size = {size: gradients(loaded, loss, batch, size) for size in (1, 4, 16)}
    loss.balance = None
    without = gradients(loaded, loss, batch, 16)
    loaded.model.zero_grad(set_to_none=True)
    (2.0 * reference(loaded, batch)).backward()
    for name, parameter in loaded.trainable():
        alone = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        expected = without[name] + alone
        for found in by_size.values():
            torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6)
    gate = "model.layers.0.mlp.gate.weight"
    assert float((by_size[1][gate] - without[gate]).norm()) > 0.1 * float(without[gate].norm()), "nothing was balanced"


def test_weight_zero_is_bit_equal_to_none(tmp_path: Path) -> None:
    batch, found = ragged(), []
    for moe in ({"aux_loss_weight": 0.0}, {"aux_loss_weight": 0.0, "watch_experts": False}):
        loaded, loss = loaded_with_loss(tmp_path, "mixtral", method=FULL["method"], moe=moe)
        found.append(gradients(loaded, loss, batch, 4))
    assert loss.balance is None
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


@pytest.mark.parametrize("family", MIXTURES)
def test_counted_choices_are_those_of_the_model_s_own_routers(tmp_path: Path, family: str) -> None:
    loaded, loss = loaded_with_loss(tmp_path, family, **FULL)
    indices: list[torch.Tensor] = []
    for name, module in loaded.base.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(lambda _module, _given, output: indices.append(output[2]))
    batch = ragged()
    counted = loss.terms(batch).choices_LE
    assert counted is not None and batch.row_tokens_B is not None and loss.balance is not None
    real = (torch.arange(12) < batch.row_tokens_B[:, None]).flatten()
    experts = loss.balance.experts
    expected = torch.stack([each[real].flatten().bincount(minlength=experts) for each in indices])
    assert torch.equal(counted, expected)
    assert counted.sum(1).tolist() == [int(batch.row_tokens_B.sum()) * loss.balance.per_token] * len(indices)


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        ({}, 0.0),
        ({"moe": {"freeze_router": False}}, 0.001),
        ({"moe": {"freeze_router": False, "aux_loss_weight": 0.5}}, 0.5),
        (FULL, 0.001),
        ({"method": {"kind": "full", "freeze": ["**.gate.**"]}}, 0.0),
        ({"method": {"kind": "full", "train_only": ["**.mlp.gate"]}}, 0.001),
    ],
)
def test_the_default_weight_is_the_model_s_own_where_routers_learn(
    tmp_path: Path, options: dict[str, Any], weight: float
) -> None:
    loaded, loss = loaded_with_loss(tmp_path, "mixtral", **options)
    assert loss.balance is not None and loss.balance.weight == weight
    assert not any("aux_loss_weight" in notice for notice in loaded.notices)


def test_a_weight_without_a_router_that_learns_is_warned_of(tmp_path: Path) -> None:
    frozen, _ = loaded_with_loss(tmp_path, "mixtral", moe={"aux_loss_weight": 0.01})
    assert any("no router is trained" in notice for notice in frozen.notices)
    dense, loss = loaded_with_loss(tmp_path, "llama", moe={"aux_loss_weight": 0.01})
    assert any("has no experts" in notice for notice in dense.notices) and loss.balance is None


def test_families_with_another_rule_are_refused_a_weight_and_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.expert_balance.TOP_K_FAMILIES", frozenset({"qwen3_moe"}))
    spec = run_spec(str(write_model(tmp_path / "model", "mixtral")), moe={"freeze_router": False})
    loaded = load(spec)
    assert expert_balance(spec.recipe, loaded) is None
    assert any("is not measured" in notice for notice in loaded.notices)
    weighted = spec.recipe.model_copy(update={"moe": spec.recipe.moe.model_copy(update={"aux_loss_weight": 0.1})})
    with pytest.raises(UsageError, match="aux_loss_weight"):
        expert_balance(weighted, loaded)


def test_every_family_is_tried_here() -> None:
    assert MIXTURES.keys() == TOP_K_FAMILIES


def test_evaluation_routes_nothing(tmp_path: Path) -> None:
    loaded, loss = loaded_with_loss(tmp_path, "mixtral")
    loaded.model.eval()
    assert loss.terms(replace(ragged(), row_tokens_B=None)).choices_LE is None
