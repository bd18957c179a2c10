"""Saved models and adapters open with peft and transformers alone, and give the engine's own logits: bit for bit, or to
the rounding of fp32 where peft adds up an adapter's product in another order."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.type_cell import opened, write_tiny
from benchmarks.type_configs import tiny_config
from engine.errors import UsageError
from engine.model.loaded import LoadedModel
from tests.model.samples import batch_of, disturb, load, load_family, logits_of, run_spec, tokenizer_at, write_model

TRAINED = ["qwen2", "gemma2", "gpt2", "gpt_neox", "mixtral", "qwen3_moe", "phi3"]


@pytest.mark.parametrize("family", TRAINED)
def test_a_full_model_opens_with_transformers(tmp_path: Path, family: str) -> None:
    loaded = load_family(tmp_path, family, method={"kind": "full"})
    disturb(loaded)
    loaded.save(tmp_path / "result")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "result", dtype=torch.float32)
    reopened.set_attn_implementation(loaded.attention)
    batch = batch_of()
    assert torch.equal(logits_of(reopened, batch), logits_of(loaded.model, batch))


@pytest.mark.parametrize("method", [{}, {"dora": True}, {"rslora": True, "rank": 3}, {"also_train": ["model.norm"]}])
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_an_adapter_opens_with_peft(tmp_path: Path, family: str, method: dict[str, object]) -> None:
    loaded = load_family(tmp_path, family, method=method)
    disturb(loaded)
    loaded.save(tmp_path / "result")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        reopened = PeftModel.from_pretrained(base, tmp_path / "result")
    assert reopened.peft_config["default"].base_model_name_or_path == str(tmp_path / family)
    others = [file for file in (tmp_path / "result").iterdir() if file.name != "adapter_config.json"]
    assert all(str(tmp_path).encode() not in file.read_bytes() for file in others)
    batch = batch_of()
    torch.testing.assert_close(logits_of(reopened, batch), logits_of(loaded.model, batch), rtol=1e-5, atol=1e-6)
    there = dict(reopened.named_parameters())
    names = [name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad]
    assert names and all(torch.equal(there[name], loaded.model.get_parameter(name)) for name in names)


def test_an_adapter_of_a_base_in_a_folder_opens_with_the_auto_class_of_peft(tmp_path: Path) -> None:
    loaded = load_family(tmp_path, "llama")
    disturb(loaded)
    loaded.save(tmp_path / "result")
    opened = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "result"), dtype=torch.float32)
    batch = batch_of()
    torch.testing.assert_close(logits_of(opened, batch), logits_of(loaded.model, batch), rtol=1e-5, atol=1e-6)


def test_an_adapter_on_fused_experts_opens_with_peft(tmp_path: Path) -> None:
    targets = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
    loaded = load_family(tmp_path, "mixtral", method={"targets": targets, "rank": 2})
    disturb(loaded)
    loaded.save(tmp_path / "result")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral", dtype=torch.float32)
    reopened = PeftModel.from_pretrained(base, tmp_path / "result")
    batch = batch_of()
    assert torch.allclose(logits_of(reopened, batch), logits_of(loaded.model, batch), atol=1e-6), "peft adds weights"


def test_the_head_trained_beside_lora_on_a_tied_model_opens_with_peft(tmp_path: Path) -> None:
    loaded = load_family(tmp_path, "gemma2", method={"also_train": ["lm_head"]})
    disturb(loaded)
    loaded.save(tmp_path / "result")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "gemma2", dtype=torch.float32)
    base.set_attn_implementation(loaded.attention)
    reopened = PeftModel.from_pretrained(base, tmp_path / "result")
    batch = batch_of()
    assert torch.equal(logits_of(reopened, batch), logits_of(loaded.model, batch))


def reopens_with_its_base(loaded: LoadedModel, folder: Path, tolerance: float = 0.0) -> bool:
    """Whether the saved adapter on its saved base, opened with peft and transformers, gives the same logits as
    `loaded`."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    reopened = PeftModel.from_pretrained(base, folder)
    batch = batch_of()
    return torch.allclose(logits_of(reopened, batch), logits_of(loaded.model, batch), rtol=0.0, atol=tolerance)


def test_a_base_that_exists_nowhere_else_is_saved_beside_its_adapter(tmp_path: Path) -> None:
    loaded = load(run_spec(train={"seed": 3}))
    disturb(loaded)
    loaded.save(tmp_path / "result")
    assert reopens_with_its_base(loaded, tmp_path / "result")


def test_a_base_that_exists_nowhere_else_is_saved_without_the_wrapping_of_adapters_on_experts(tmp_path: Path) -> None:
    targets = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
    write_model(tmp_path / "mixtral", "mixtral")
    loaded = load(run_spec(str(tmp_path / "mixtral"), method={"targets": targets}, init="random"))
    disturb(loaded)
    loaded.save(tmp_path / "result")
    assert reopens_with_its_base(loaded, tmp_path / "result", tolerance=1e-6)


@pytest.mark.parametrize("method", [{"kind": "full"}, {}, {"dora": True}, {"also_train": ["model.embed_tokens"]}])
@pytest.mark.parametrize("family", ["qwen2", "mixtral", "gpt2"])
def test_load_weights_restores_every_trainable_in_place(tmp_path: Path, family: str, method: dict[str, object]) -> None:
    if family == "gpt2" and "also_train" in method:
        method = {"also_train": ["transformer.ln_f"]}
    loaded = load_family(tmp_path, family, method=method)
    disturb(loaded)
    loaded.save(tmp_path / "saved")
    wanted = {name: tensor.detach().clone() for name, tensor in loaded.trainable()}
    places = {name: tensor.data_ptr() for name, tensor in loaded.trainable()}
    disturb(loaded)
    loaded.load_weights(tmp_path / "saved")
    for name, tensor in loaded.trainable():
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.data_ptr() == places[name], name


def test_weights_of_another_method_are_refused(tmp_path: Path) -> None:
    loaded = load_family(tmp_path, "qwen2", method={"targets": ["q_proj"]})
    loaded.save(tmp_path / "saved")
    other = load(run_spec(str(tmp_path / "qwen2"), method={"targets": ["k_proj"]}))
    with pytest.raises(UsageError, match="has different parameters"):
        other.load_weights(tmp_path / "saved")


def test_a_saved_adapter_is_continued_with_its_own_rank(tmp_path: Path) -> None:
    first = load_family(tmp_path, "llama", method={"rank": 3})
    disturb(first)
    first.save(tmp_path / "adapter")
    second = load(run_spec(str(tmp_path / "llama"), adapter=str(tmp_path / "adapter")))
    batch = batch_of()
    assert torch.equal(logits_of(second.model, batch), logits_of(first.model, batch))
    assert [name for name, _ in second.trainable()] == [name for name, _ in first.trainable()]


def test_a_folder_with_an_adapter_stands_for_its_base_and_the_adapter(tmp_path: Path) -> None:
    first = load(run_spec())
    disturb(first)
    first.save(tmp_path / "adapter")
    second = load(run_spec(str(tmp_path / "adapter")))
    batch = batch_of()
    assert torch.equal(logits_of(second.model, batch), logits_of(first.model, batch))
    second.save(tmp_path / "again")
    assert not (tmp_path / "again" / "base").exists()


def test_the_tokenizer_is_saved_with_the_result(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen2")
    loaded = load(run_spec(str(tmp_path / "model"), method={"kind": "full"}))
    loaded.save(tmp_path / "result")
    text = "the 5 of march 2021 → née"
    assert tokenizer_at(tmp_path / "result").encode(text) == loaded.tokenizer.encode(text)


@pytest.mark.parametrize("model_type", ["inkling2_text", "ernie4_5_vl_moe"])
def test_weights_that_transformers_converts_are_saved_as_it_saves_them(tmp_path: Path, model_type: str) -> None:
    """Interleaved rows have the shape of the rows before; Ernie's experts for text and images are one tensor."""
    config = tiny_config(model_type)
    config.get_text_config().vocab_size = 400
    base = write_tiny(config, tmp_path / "base")
    loaded = load(run_spec(str(base), method={"kind": "full"}))
    disturb(loaded)
    loaded.save(tmp_path / "full")
    batch = batch_of()
    torch.testing.assert_close(logits_of(opened(tmp_path / "full"), batch), logits_of(loaded.model, batch))
