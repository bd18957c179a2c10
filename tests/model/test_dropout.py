"""Keyed dropout: masks depend on the key alone, keep at the right rate, and are independent of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine.model.dropout import KeyedDropout, keyed, keyed_dropouts
from engine.model.dropout_kernel import keep_mask
from engine.model.dropout_key import row_key
from engine.model.loss import make_loss
from tests.model.samples import batch_of, cpu, disturb, load, run_spec
from tests.present import grad_of, present

CPU = torch.device("cpu")


def masks(probability: float = 0.1, count: int = 20, length: int = 64, features: int = 96) -> torch.Tensor:
    keys = [row_key(1, step, sample, "q_proj") for step in range(4) for sample in range(count // 4)]
    return torch.stack([keep_mask(key, length, features, probability, CPU) for key in keys])


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.5, 0.9])
def test_the_keep_rate_is_right(probability: float) -> None:
    mask = masks(probability)
    deviation = (probability * (1 - probability) / mask.numel()) ** 0.5
    assert abs(float(mask.float().mean()) - (1 - probability)) < 4 * deviation


def test_rows_columns_and_samples_are_uncorrelated() -> None:
    mask = masks(0.5, count=40).float() - 0.5
    for shifted in (mask.roll(1, 0), mask.roll(1, 1), mask.roll(1, 2), mask.roll((1, 1), (1, 2)), mask.transpose(1, 2)):
        if shifted.shape != mask.shape:
            shifted, other = shifted[:, :64, :64], mask[:, :64, :64]
            off_diagonal = ~torch.eye(64, dtype=torch.bool)
            products = (shifted * other)[:, off_diagonal] * 4
        else:
            products = shifted * mask * 4
        assert abs(float(products.mean())) < 5 / products.numel() ** 0.5


def test_no_position_and_no_feature_is_favoured() -> None:
    mask = masks(0.5, count=400, length=32, features=32).float()
    deviation = 0.5 / (400 * 32) ** 0.5
    assert float((mask.mean((0, 2)) - 0.5).abs().max()) < 5 * deviation
    assert float((mask.mean((0, 1)) - 0.5).abs().max()) < 5 * deviation


@pytest.mark.parametrize("change", [{"seed": 2}, {"step": 2}, {"sample": 2}, {"module": "k_proj"}])
def test_every_part_of_the_key_counts(change: dict[str, Any]) -> None:
    key: dict[str, Any] = {"seed": 1, "step": 1, "sample": 1, "module": "q_proj"}
    first = keep_mask(row_key(**key), 64, 64, 0.5, CPU)
    second = keep_mask(row_key(**{**key, **change}), 64, 64, 0.5, CPU)
    assert 0.45 < float((first == second).float().mean()) < 0.55


def test_padding_and_company_leave_a_samples_mask_alone() -> None:
    layer = KeyedDropout(0.3, "q_proj").train()
    with keyed([layer], seed=0, step=1, sample_ids=[4, 9]):
        together = layer(torch.ones(2, 10, 16))
    with keyed([layer], seed=0, step=1, sample_ids=[9]):
        alone = layer(torch.ones(1, 7, 16))
    assert torch.equal(together[1, :7], alone[0])


def test_backward_uses_the_forward_mask() -> None:
    layer = KeyedDropout(0.3, "q_proj").train()
    values = torch.ones(2, 5, 8, requires_grad=True)
    with keyed([layer], seed=0, step=1, sample_ids=[0, 1]):
        dropped = layer(values)
    dropped.sum().backward()
    assert torch.equal(grad_of(values), dropped.detach())


def test_evaluation_drops_nothing_and_training_outside_keyed_is_a_defect() -> None:
    layer = KeyedDropout(0.3, "q_proj")
    values = torch.ones(1, 3, 4)
    assert layer.eval()(values) is values
    with pytest.raises(RuntimeError, match="outside"):
        layer.train()(values)


def test_peft_dropouts_are_replaced() -> None:
    loaded = load(run_spec(method={"dropout": 0.2}))
    inside = [module for module in loaded.model.modules() if isinstance(module, (nn.Dropout, KeyedDropout))]
    assert len(inside) == 28
    assert all(isinstance(module, KeyedDropout) and module.p == 0.2 for module in inside)


def test_split_and_checkpointing_leave_gradients_alone() -> None:
    loaded = load(run_spec(method={"dropout": 0.3}))
    disturb(loaded)
    loss = make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=8, device=cpu())
    batch = batch_of(rows=4)

    def gradients(splits: list[list[int]]) -> list[torch.Tensor]:
        loaded.model.zero_grad()
        for rows in splits:
            labels = batch.labels_BS[rows]
            part = type(batch)(
                batch.input_ids_BS[rows],
                labels,
                present(batch.attention_mask_BS)[rows],
                None,
                tuple(rows),
                int((labels[:, 1:] != -100).sum()),
            )
            with keyed(keyed_dropouts(loaded.model), seed=7, step=3, sample_ids=part.sample_ids):
                (loss(part) / batch.target_tokens).backward()
        return [grad_of(p).clone() for _, p in loaded.trainable()]

    whole = gradients([[0, 1, 2, 3]])
    assert all(gradient.norm() > 0 for gradient in whole)
    torch.testing.assert_close(gradients([[3, 1], [0, 2]]), whole, rtol=1e-5, atol=1e-7)
    loaded.set_checkpointing(False)
    torch.testing.assert_close(gradients([[0, 1, 2, 3]]), whole, rtol=0, atol=0)
