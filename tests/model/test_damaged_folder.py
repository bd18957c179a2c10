"""Files of a model folder with numbers of any length, deep nesting, or values of another kind are errors with the
folder's or the file's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.schema.recipe import Model
from engine.errors import UsageError
from engine.model.config import load_config
from engine.model.reference import find_starting_weights
from engine.model.tokenizer import byte_tokenizer, load_tokenizer

CONFIG = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300,
          "architectures": ["LlamaForCausalLM"]}  # fmt: skip
DEEP = '{"a":' * 50_000 + "1" + "}" * 50_000


def load_with(folder: Path, name: str, text: str) -> None:
    """Load the config and the tokenizer of a folder in which one file has this text."""
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    (folder / name).write_text(text)
    model = Model(id=str(folder))
    load_config(find_starting_weights(model), False)
    load_tokenizer(model)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json", "added_tokens.json"]
)
@pytest.mark.parametrize("text", [DEEP, "[" * 100_000, '{"x": ' + "9" * 5000 + "}", "12"], ids=lambda text: text[:12])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_with(tmp_path, name, text)
    assert str(tmp_path) in f"{caught.value.found} {caught.value.fix}"


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "1e999"), ("vocab_size", "[]"), ("architectures", "12")],
)
def test_a_value_of_another_kind_is_an_error_of_the_config(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_with(tmp_path, "config.json", json.dumps({**CONFIG, key: "VALUE"}).replace('"VALUE"', value))
    assert str(tmp_path) in f"{caught.value.found} {caught.value.fix}"


def test_an_end_token_out_of_range_is_no_token(tmp_path: Path) -> None:
    load_with(tmp_path, "generation_config.json", '{"eos_token_id": [' + "9" * 300 + ", -1]}")
