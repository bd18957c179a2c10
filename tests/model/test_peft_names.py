"""Layers whose adapters peft would put elsewhere, or would not find again, are found by asking peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from benchmarks.type_cell import opened, refusal, write_tiny
from benchmarks.type_configs import tiny_config
from engine.architecture.families import RENAMED_BY_PEFT
from engine.errors import UsageError
from engine.model.adapters import add_adapters, layers_without_adapter, linear_layers
from engine.model.config import auto_class
from engine.model.peft_names import not_found_again
from tests.model.samples import batch_of, disturb, load, logits_of, name_base, run_spec
from tests.train.run_helpers import write_samples


def shown(model_type: str) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(tiny_config(model_type)).from_config(tiny_config(model_type))
    return model


def test_a_nested_mixture_has_no_adapters_on_what_peft_takes_for_its_experts() -> None:
    model = shown("glm4v_moe")
    reasons = layers_without_adapter(model, linear_layers(model))
    assert "peft applies that name to the fused experts" in reasons["model.language_model.layers.0.mlp.gate_proj"]
    assert not any("self_attn" in name for name in reasons)


def test_layers_that_peft_renames_when_it_opens_an_adapter_have_none(tmp_path: Path) -> None:
    """transformers' mapping of Laguna's older checkpoints turns `shared_experts` into `shared_experts.`."""
    base = write_tiny(tiny_config("laguna"), tmp_path / "base")
    loaded = load(run_spec(str(base)))
    assert "shared_experts" not in str(loaded.coverage.adapted) and "shared_experts" in str(loaded.coverage.left_out)
    assert any("peft renames and loses it when it loads the adapter of a laguna" in each for each in loaded.notices)
    disturb(loaded)
    loaded.save(tmp_path / "adapter")
    name_base(tmp_path / "adapter", base)
    alone, batch = PeftModel.from_pretrained(opened(base), tmp_path / "adapter"), batch_of()
    torch.testing.assert_close(logits_of(alone, batch), logits_of(loaded.model, batch))


def test_a_model_of_which_peft_finds_nothing_again_is_refused() -> None:
    model = shown("deepseek_ocr2")
    with pytest.raises(
        UsageError, match="no layer of the language model can have an adapter: peft renames and loses it"
    ) as refused:
        add_adapters(model, run_spec("owner/name").recipe.method)
    assert 'method.kind = "full"' in str(refused.value.fix)


@pytest.mark.parametrize("model_type", sorted(RENAMED_BY_PEFT))
def test_a_model_of_which_peft_finds_nothing_again_is_refused_by_its_config(tmp_path: Path, model_type: str) -> None:
    model = shown(model_type)
    text = [name for name in linear_layers(model) if "language_model" in name]
    assert text and not_found_again(model, text) == set(text)
    samples = write_samples(tmp_path / "samples.jsonl", count=2)
    config = tiny_config(model_type).to_dict()
    said = refusal(config, tmp_path / "config", samples)
    assert said is not None and "whose layers peft renames" in said and 'set method.kind = "full"' in said
    assert refusal(config, tmp_path / "config", samples, method="full") is None
