"""Every family: adapters cover its linear layers, decoder + head is its own forward, checkpointing changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.data.batch import Batch
from engine.model.attention import attends_to_later_tokens
from engine.model.loaded import LoadedModel
from engine.model.loss import make_loss
from tests.model.samples import FAMILIES, batch_of, cpu, disturb, load_family, logits_of
from tests.present import grad_of


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def gradients(
    loaded: LoadedModel, loss: Callable[[Batch], torch.Tensor], batch: Batch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loaded.model.zero_grad()
    total = loss(batch)
    total.backward()
    return total.detach(), {name: grad_of(parameter).clone() for name, parameter in loaded.trainable()}


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_loss_of_a_lora_model_is_the_models_own_cross_entropy(tmp_path: Path, family: str) -> None:
    loaded = load_family(tmp_path, family)
    disturb(loaded)
    batch = batch_of()
    loss = make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=5, device=cpu())
    logits_BSV = logits_of(loaded.model, batch)
    expected = torch.nn.functional.cross_entropy(
        logits_BSV[:, :-1].flatten(0, 1).float(), batch.labels_BS[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    total, grads = gradients(loaded, loss, batch)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
    assert all(bool(gradient.abs().sum() > 0) for gradient in grads.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_no_gradient(tmp_path: Path, family: str) -> None:
    loaded = load_family(tmp_path, family)
    disturb(loaded)
    batch = batch_of()
    loss = make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=64, device=cpu())
    assert loaded.checkpointing
    with_it = gradients(loaded, loss, batch)
    loaded.set_checkpointing(False)
    without = gradients(loaded, loss, batch)
    torch.testing.assert_close(with_it, without, rtol=0, atol=0)
    assert loaded.layers > 1
    loaded.set_checkpointing(1)
    recomputing = [module for module in loaded.base.modules() if getattr(module, "gradient_checkpointing", False)]
    assert sum(isinstance(module, GradientCheckpointingLayer) for module in recomputing) == loaded.checkpointing == 1
    torch.testing.assert_close(gradients(loaded, loss, batch), without, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_leaves_no_linear_layer_out(tmp_path: Path, family: str) -> None:
    coverage = load_family(tmp_path, family).coverage
    assert coverage.adapted
    assert not coverage.left_out


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_targets_reach_attention_only(tmp_path: Path, family: str) -> None:
    coverage = load_family(tmp_path, family, method={"targets": "attention"}).coverage
    assert coverage.adapted
    assert not any("mlp" in kind for kind in coverage.adapted)
    assert not any("attn" in kind or "attention" in kind for kind in coverage.left_out)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fused_experts_without_adapters_are_reported(tmp_path: Path, family: str) -> None:
    text = load_family(tmp_path, family).coverage.text()
    assert "fused experts without adapter" in text
    assert "experts.gate_up_proj ×2" in text


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fused_experts_get_adapters_when_named(tmp_path: Path, family: str) -> None:
    targets = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
    loaded = load_family(tmp_path, family, method={"targets": targets, "rank": 2})
    assert loaded.coverage.experts_adapted == {"experts.gate_up_proj": 2, "experts.down_proj": 2}
    assert not loaded.coverage.experts_left_out
    loss = make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=None, device=cpu())
    disturb(loaded)
    _, grads = gradients(loaded, loss, batch_of())
    assert any("experts" in name and bool(gradient.abs().sum() > 0) for name, gradient in grads.items())


def test_adapters_on_several_weights_of_the_same_experts_go_by_names_of_their_own(tmp_path: Path) -> None:
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    names = [name for name, _ in load_family(tmp_path, "mixtral", method={"targets": targets}).trainable()]
    assert len(set(names)) == len(names) == 2 * 2 * len(targets)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_an_unfrozen_router_learns_in_full_beside_lora(tmp_path: Path, family: str) -> None:
    names = [name for name, _ in load_family(tmp_path, family, moe={"freeze_router": False}).trainable()]
    assert "model.layers.0.mlp.gate.weight" in names
    assert not any("experts" in name for name in names)


@pytest.mark.parametrize("frozen", [None, False, True])
def test_full_fine_tuning_trains_the_router_unless_it_is_frozen(tmp_path: Path, frozen: bool | None) -> None:
    moe = {} if frozen is None else {"freeze_router": frozen}
    names = [name for name, _ in load_family(tmp_path, "qwen3_moe", method={"kind": "full"}, moe=moe).trainable()]
    assert any(".gate." in name for name in names) == (not frozen)
    assert any("experts" in name for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_families_are_run_without_a_padding_mask(tmp_path: Path, family: str) -> None:
    assert not load_family(tmp_path, family).attends_to_padding


def test_a_model_that_does_not_say_it_is_causal_keeps_its_padding_mask() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2))
    assert attends_to_later_tokens(bloom)
