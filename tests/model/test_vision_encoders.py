"""Vision-language models trained on text: adapters are added to the decoder only, and the vision encoder is not
changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from engine.model.decoder import hidden_states
from engine.model.loaded import LoadedModel
from engine.model.loss import make_loss
from engine.model.tokenizer import byte_tokenizer
from tests.budget.metered_step import WITH_VISION_ENCODER
from tests.model.samples import batch_of, cpu, disturb, load, run_spec
from tests.present import grad_of

FAMILIES = list(WITH_VISION_ENCODER)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def write(folder: Path, family: str) -> Path:
    facts = {key: value for key, value in WITH_VISION_ENCODER[family].items() if key != "model_type"}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **facts)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def loaded_from(folder: Path, family: str, **options: Any) -> LoadedModel:
    return load(run_spec(str(write(folder, family)), **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_trains_adapters_of_the_decoder_and_the_loss_is_the_models_own(tmp_path: Path, family: str) -> None:
    loaded = loaded_from(tmp_path, family)
    disturb(loaded)
    names = [name for name, _ in loaded.trainable()]
    assert names and all(name.startswith("model.language_model.") for name in names)
    batch = batch_of()
    loss = make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=5, device=cpu())
    total = loss(batch)
    total.backward()
    with torch.no_grad():
        loaded.model.eval()
        logits_BSV = loaded.model(input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS).logits
    expected = torch.nn.functional.cross_entropy(
        logits_BSV[:, :-1].flatten(0, 1).float(), batch.labels_BS[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(total.detach(), expected, rtol=1e-5, atol=1e-4)
    assert all(bool(grad_of(parameter).abs().sum() > 0) for _, parameter in loaded.trainable())


@pytest.mark.parametrize("family", FAMILIES)
def test_full_fine_tuning_on_text_leaves_the_vision_encoder_as_it_is(tmp_path: Path, family: str) -> None:
    loaded = loaded_from(tmp_path, family, method={"kind": "full"})
    names = {name for name, _ in loaded.trainable()}
    assert "model.language_model.embed_tokens.weight" in names
    assert not any("visual" in name or "vision_tower" in name or "projector" in name for name in names)


def test_a_pattern_reaches_into_the_vision_encoder(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, "qwen2_vl", method={"targets": ["model.visual.blocks.*.attn.qkv", "q_proj"]})
    assert loaded.coverage.adapted == {"attn.qkv": 3, "self_attn.q_proj": 3}


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_needs_no_mask_although_the_vision_encoder_looks_both_ways(tmp_path: Path, family: str) -> None:
    assert not loaded_from(tmp_path, family).attends_to_padding


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_each_other(tmp_path: Path, family: str) -> None:
    loaded = loaded_from(tmp_path, family)
    loaded.model.eval()
    ids_BS = torch.randint(0, 250, (1, 21), generator=torch.Generator().manual_seed(2))
    positions_BS = torch.cat([torch.arange(9), torch.arange(12)])[None]
    alone = batch_of(1, 12, masked=0)
    with torch.no_grad():
        packed_H = hidden_states(loaded, replace(alone, input_ids_BS=ids_BS, position_ids_BS=positions_BS))[0, 9:]
        second_H = hidden_states(loaded, replace(alone, input_ids_BS=ids_BS[:, 9:], attention_mask_BS=None))[0]
    torch.testing.assert_close(packed_H, second_H, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_with_a_vision_encoder_is_read_back(tmp_path: Path, family: str) -> None:
    loaded = loaded_from(tmp_path / "a", family, method={"kind": "full"})
    disturb(loaded)
    loaded.save(tmp_path / "b")
    again = load(run_spec(str(tmp_path / "b"), method={"kind": "full"}))
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), again.model.parameters(), strict=True))
