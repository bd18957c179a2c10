"""Patterns in the config of a saved adapter, which peft matches as regular expressions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config.schema.recipe import Method
from engine.errors import UsageError
from engine.model import adapter_patterns
from engine.model.adapters import continue_adapter
from engine.model.saved_adapter import open_adapter

ENDLESS = "(([a-z_.0-9])+)+!"


def small_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=16,
        intermediate_size=8,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def saved(folder: Path, **changes: Any) -> str:
    """An adapter on q_proj, its config with `changes`."""
    get_peft_model(small_model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(folder))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(folder)


@pytest.mark.parametrize("changes", [
    {"target_modules": ENDLESS}, {"exclude_modules": ENDLESS}, {"rank_pattern": {ENDLESS: 4}},
    {"alpha_pattern": {ENDLESS: 4}}, {"modules_to_save": [ENDLESS]},
    {"layers_pattern": [ENDLESS], "layers_to_transform": [0]},
])  # fmt: skip
def test_a_pattern_that_does_not_end_is_an_error(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_patterns, "CPU_SECONDS", 0.2)
    with pytest.raises(UsageError, match=r"takes more than 0.2 s"):
        continue_adapter(small_model(), saved(tmp_path, **changes), Method())


@pytest.mark.parametrize("pattern", ["q_proj(", "(?P<a>", "a{99999999999}"])
def test_what_is_no_regular_expression_is_an_error(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a regular expression"):
        open_adapter(small_model(), saved(tmp_path, target_modules=pattern))


@pytest.mark.parametrize("changes", [
    {"target_modules": r"^(?!.*visual).*(?:q_proj).*"}, {"rank_pattern": {r".*\.q_proj": 2}},
    {"target_modules": r"(?:.*?(?:language|text|model).*?(?:self_attn|mlp).*?(?:q_proj).*?)"},
])  # fmt: skip
def test_expressions_as_tools_write_them_are_matched(changes: dict[str, Any], tmp_path: Path) -> None:
    wrapped = open_adapter(small_model(), saved(tmp_path, **changes)).model
    assert sum("lora_A" in name for name, _ in wrapped.named_parameters()) == 2
