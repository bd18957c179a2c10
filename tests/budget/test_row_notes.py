"""A plan says which way prompts with completions go, as far as files tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.budget.advise.row_notes import notes_on_rows
from engine.config.schema.recipe import Recipe


def notes(path: Path, model: dict[str, Any] | None = None, **source: Any) -> str:
    data = {"sources": [{"name": "mine", "path": str(path), **source}]}
    return "\n".join(
        notes_on_rows(Recipe.model_validate({"model": {"id": "builtin:tiny", **(model or {})}, "data": data}))
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"prompt": "Rain?", "completion": "Yes."}\n'),
        ("a.jsonl", '\n{"question": "Rain?", "answer": "Yes."}\n'),
        ("a.json", '[\n {"input": "Rain?", "output": "Yes."}]'),
        ("a.json", '{"instruction": "Rain?", "output": "Yes."}'),
        ("a.csv", "\ufeffid;prompt;completion\n1;Rain?;Yes.\n"),
        ("folder/rows.tsv", "prompt\tcompletion\nRain?\tYes.\n"),
    ],
)
def test_pairs_go_through_the_template_unless_the_source_says_none(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, "utf-8")
    place = file if file.parent == tmp_path else file.parent
    assert notes(place).startswith("prompts and completions of mine are rendered with the model's chat template; ")
    assert "plain text without the chat template" in notes(place, template="none")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"messages": []}\n'),
        ("a.jsonl", '{"text": "Rain."}\n'),
        ("a.jsonl", "{broken\n"),
        ("a.jsonl", "[" * 100_000),
        ("a.csv", ""),
        ("a.parquet", "PAR1"),
    ],
)
def test_nothing_is_said_of_other_rows_or_of_what_cannot_be_seen(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    assert notes(tmp_path / name) == notes(tmp_path / "missing.jsonl") == ""


def test_renamed_columns_and_a_named_format_count(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "Rain?", "a": "Yes."}\n')
    assert notes(file) == ""
    assert "chat template" in notes(file, columns={"prompt": "q", "completion": "a"})
    assert "chat template" in notes(tmp_path / "missing.jsonl", format="prompt-completion")


def test_a_base_model_without_a_template_is_named_as_one(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.jsonl", tmp_path / "model"
    file.write_text('{"prompt": "Rain?", "completion": "Yes."}\n')
    folder.mkdir()
    assert ", if it has one" in notes(file, {"id": str(folder)})
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert "the model has no chat template" in notes(file, {"id": str(folder)})
    assert "rendered with" in notes(file, {"id": str(folder), "chat_template": "plain"})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert "are rendered with the model's chat template; " in notes(file, {"id": str(folder)})
