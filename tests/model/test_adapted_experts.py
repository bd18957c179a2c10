"""Adapters on fused experts: computed in groups they give what peft gives, with less memory, which the plan knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations import moe

from engine.architecture.lookup import find_architecture
from engine.budget.predict.prediction import predict
from engine.budget.predict.static import static_bytes
from engine.budget.trace.memory_config import memory_config_of
from engine.config.load import resolve
from engine.extras.simulate.step import simulate_step
from engine.model import adapted_experts
from engine.model.adapted_experts import PRODUCT, _factors
from engine.model.head import find_head
from engine.model.loaded import LoadedModel
from engine.model.loss import LossFunction
from engine.train.run.training_setup import TrainingSetup
from engine.verify.replaced import EXPERT_ADAPTERS
from tests.budget.metered_step import GPT_OSS, MIXTRAL, QWEN3_MOE, folder_of, measured_step
from tests.budget.metered_step import run_spec as metered_spec
from tests.model.samples import MIXTURES, batch_of, disturb, load, run_spec, write_model
from tests.train.proofs.proved import proved, small_setup

TARGETS = ["q_proj", "v_proj", "experts.gate_up_proj", "experts.down_proj"]


def adapted(folder: Path, family: str, rank: int, **method: Any) -> LoadedModel:
    folder = write_model(folder, family, **MIXTURES.get(family, {}))
    loaded = load(run_spec(str(folder), method={"rank": rank, "targets": TARGETS, **method}))
    disturb(loaded)
    return loaded


def loss_and_gradients(loaded: LoadedModel) -> dict[str, Tensor]:
    batch, loss = batch_of(rows=3, length=14), LossFunction(loaded, find_head(loaded.base), "chunked", 0.0, 16)
    loaded.model.zero_grad(set_to_none=True)
    value = loss.minimised(loss.terms(batch).share_of(batch.target_tokens, 42))
    value.backward()
    gradients = {name: each.grad.clone() for name, each in loaded.trainable() if each.grad is not None}
    assert len(gradients) == len(loaded.trainable())
    return {"loss": value.detach(), **gradients}


def left_to_peft(loaded: LoadedModel) -> int:
    """Give peft its computation back; returns how many blocks of experts had another."""
    assert loaded.expert_adapters is not None
    loaded.expert_adapters.remove()
    assert not any("forward" in block.__dict__ for block in loaded.expert_adapters.blocks)
    return len(loaded.expert_adapters)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "qwen2_moe"])
@pytest.mark.parametrize("rank", [3, 8])
def test_groups_give_the_loss_and_gradients_of_peft(tmp_path: Path, family: str, rank: int) -> None:
    loaded = adapted(tmp_path, family, rank)
    found, plain = loss_and_gradients(loaded), getattr(moe, PRODUCT)
    assert left_to_peft(loaded) == loaded.layers
    expected = loss_and_gradients(loaded)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-6), name
    assert getattr(moe, PRODUCT) is plain


def test_one_weight_alone_may_have_an_adapter_and_switched_off_the_base_is_left(tmp_path: Path) -> None:
    loaded = adapted(tmp_path, "mixtral", 4, targets=["experts.down_proj"])
    ids = torch.arange(12)[None]
    with torch.no_grad():
        with_adapter = loaded.model(input_ids=ids).logits
        with loaded.adapter_off():
            without = loaded.model(input_ids=ids).logits
        assert torch.equal(without, AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits)
    assert left_to_peft(loaded) == loaded.layers
    with torch.no_grad():
        assert torch.allclose(with_adapter, loaded.model(input_ids=ids).logits, atol=1e-5)
    assert not torch.allclose(with_adapter, without, atol=1e-3)


def test_a_saved_adapter_is_peft_s(tmp_path: Path) -> None:
    loaded = adapted(tmp_path / "base", "qwen3_moe", 4)
    loaded.save(tmp_path / "adapter")
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    loaded.model.eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(opened(input_ids=ids).logits, loaded.model(input_ids=ids).logits, atol=1e-5)


@contextmanager
def mixture_setup(folder: Path) -> Iterator[TrainingSetup]:
    path = write_model(folder / "model", "mixtral", **MIXTURES["mixtral"])
    model = {"id": str(path), "tokenizer": str(path), "init": "pretrained"}
    with small_setup(folder, model=model, method={"kind": "lora", "rank": 4, "targets": TARGETS}) as setup:
        yield setup


def test_a_run_proves_that_groups_give_what_peft_gives(tmp_path: Path) -> None:
    with mixture_setup(tmp_path) as setup:
        found = proved(setup, tmp_path, proofs=[EXPERT_ADAPTERS])["expert_adapters"]
        assert found.passed and "adapters on 2 blocks of experts" in found.detail
        blocks = setup.context.loaded.expert_adapters
        assert blocks is not None and all("forward" in block.__dict__ for block in blocks.blocks)


def wrong_scale(wrapper: Any, *given: Any) -> tuple[Tensor, Tensor, float]:
    a, b, scaling = _factors(wrapper, *given)
    return a, b, 1.1 * scaling


@pytest.mark.parametrize("change", ["wrong scale", "another product"])
def test_adapters_that_a_later_transformers_computes_otherwise_are_left_to_peft(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mixture_setup(tmp_path) as setup:
        if change == "wrong scale":
            monkeypatch.setattr(adapted_experts, "_factors", wrong_scale)
        else:
            monkeypatch.setattr(moe, "renamed", getattr(moe, PRODUCT), raising=False)
            monkeypatch.setattr(adapted_experts, "PRODUCT", "renamed")
        blocks = setup.context.loaded.expert_adapters
        found = proved(setup, tmp_path, proofs=[EXPERT_ADAPTERS])["expert_adapters"]
        assert found.passed is False and "peft computes them" in found.fallback, found
        assert setup.context.loaded.expert_adapters is None
        assert blocks is not None and not any("forward" in block.__dict__ for block in blocks.blocks)


@pytest.mark.parametrize(
    ("config", "rank", "keys"),
    [(QWEN3_MOE, 8, {}), (MIXTRAL, 4, {"gradient_checkpointing": False}), (GPT_OSS, 8, {})],
    ids=["qwen3_moe", "mixtral-kept", "gpt_oss"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_the_peak_of_a_real_step(
    config: dict[str, Any], rank: int, keys: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """Regression: plans had no adapters on experts at all."""
    train = {"batch_size": 4, "gradient_checkpointing": True, **keys}
    method = {"rank": rank, "targets": TARGETS}
    spec = metered_spec(folder_of(config, tmp_path), method=method, model={"dtype": dtype}, train=train)
    predicted = predict(find_architecture(spec), spec, rows=4, length=200).peak_bytes
    assert predicted == pytest.approx(measured_step(spec, 4, 200)[1], rel=0.002)
    assert predicted == pytest.approx(simulate_step(spec, rows=4, length=200).peak_bytes, rel=0.002)


def test_adapters_of_128_experts_are_gigabytes() -> None:
    """48 layers, 128 experts, rank 16: A and B of gate_up [1536, 2048] and down [2048, 768], in fp32."""
    keys = ["model.id=Qwen/Qwen3-30B-A3B", "method.rank=16", 'method.targets=["experts.*_proj"]']
    spec = resolve("80gb", "lora", keys).spec
    arch = find_architecture(spec)
    values = 48 * 128 * 16 * (1536 + 2048 + 2048 + 768)
    assert static_bytes(arch, memory_config_of(arch, spec)).total.adapters == pytest.approx(4 * values, rel=0.01)
