"""A tokenizer whose regular expressions do not end is an error when it is loaded; those in use are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.config.schema.recipe import Model
from engine.errors import UsageError
from engine.model import tokenizer_patterns
from engine.model.tokenizer import load_tokenizer

IN_USE = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'d)?|\p{N}{1,3}|\s+(?!\S)",
    r"\d{1,3}(?=(?:\d{3})*\b)",
]


def save(folder: Path, **parts: Any) -> Path:
    """A folder with a tokenizer that has these parts."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<end>": 1}, merges=[]))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder


def load(folder: Path) -> None:
    load_tokenizer(Model(id="builtin:tiny", tokenizer=str(folder)))


@pytest.mark.parametrize("expression", [r"(a+)+$", r"(\w+\s?)*$", "(q+)+Q", "((ab)+)+$"])
def test_an_expression_that_does_not_end_is_an_error(tmp_path: Path, expression: str) -> None:
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    inside = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    replace = normalizers.Replace(Regex(expression), "x")
    for folder in (save(tmp_path / "1", pre_tokenizer=inside), save(tmp_path / "2", normalizer=replace)):
        with pytest.raises(UsageError, match=r"tokenizer\.json of .*: its regular expressions fail on the text"):
            load(folder)


def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_patterns, "CPU_SECONDS", 0.01)
    with pytest.raises(UsageError, match="takes more than"):
        load(save(tmp_path, pre_tokenizer=pre_tokenizers.Split(Regex(IN_USE[0]), "isolated")))


@pytest.mark.parametrize("expression", IN_USE)
def test_expressions_in_use_are_loaded(tmp_path: Path, expression: str) -> None:
    load(save(tmp_path, pre_tokenizer=pre_tokenizers.Split(Regex(expression), "isolated")))
