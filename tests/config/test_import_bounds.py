"""YAML files of other tools, written to hang the importer: each is an error with its line, or is imported at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.files.document import parse_document
from engine.errors import SpecError
from engine.extras.imports import convert
from engine.extras.imports.convert import draft_of, parse_yaml, recipe_text

HEAD = "base_model: Qwen/Qwen3-0.6B\nadapter: lora\nlora_r: 8\nsequence_len: 512\n"
DATA = "datasets:\n- {path: data/a.jsonl, type: alpaca}\n"
NUMBERS = {
    "hex": "0x" + "f" * 5000, "octal": "0" + "7" * 5000, "binary": "0b" + "1" * 5000, "decimal": "1" * 200_000,
    "underscores": "1_" * 100_000, "float": "1." + "7" * 200_000, "base 60": ":".join(["1"] * 50_000),
    "base 60 with a fraction": ":".join(["1"] * 50_000) + ".5", "exponent": "1.0e+" + "9" * 5000,
}  # fmt: skip
"""Python's time for the decimal and base 60 ones grows with the square of their length."""


def written(folder: Path, text: str) -> Path:
    path = folder / "other.yml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_without_end_is_an_error_with_its_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r":7: a number of [\d,]+ characters"):
        draft_of(written(tmp_path, f"{HEAD}{DATA}learning_rate: {NUMBERS[name]}\n"))


@pytest.mark.parametrize("number", [*NUMBERS.values(), "1" * 200_000 + "e5"])
def test_a_text_of_digits_stays_a_text(number: str) -> None:
    assert parse_yaml(f'a: "{number}"\n', "x.yml") == {"a": number}


@pytest.mark.parametrize(("text", "line"), [
    ("%YAML 1." + "9" * 100_000 + "\n--- {a: 1}\n", 1), ('a: 1\nb: "\\U00110000"\n', 2), ("a: 1\nb: 2026-99-99\n", 2),
])  # fmt: skip
def test_what_no_computer_can_read_is_an_error_with_its_line(text: str, line: int) -> None:
    with pytest.raises(SpecError, match=rf"x.yml:{line}: not YAML"):
        parse_yaml(text, "x.yml")


@pytest.mark.parametrize("text", [
    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "[" * 100_000, "- " * 50_000 + "a", "? " * 50_000 + "a",
    "--- a\n" * 30_000, "a:\n" + "- b\n" * 3_000, "a:\n" + "- [b, c]\n" * 30_000,
])  # fmt: skip
def test_aliases_nesting_and_length_are_bounded(text: str) -> None:
    with pytest.raises(SpecError, match=r"x.yml:\d+: "):
        parse_yaml(text, "x.yml")


def test_a_file_is_a_page_of_text(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="larger than 256 KiB"):
        draft_of(written(tmp_path, HEAD + DATA + "# x\n" * (convert.MAX_BYTES // 4)))


def test_entries_of_one_name_get_numbers(tmp_path: Path) -> None:
    entries = "- {path: data/a.jsonl, type: alpaca}\n" * 1_100
    sources = draft_of(written(tmp_path, HEAD + "datasets:\n" + entries)).get("data.sources")
    names = [source["name"] for source in sources]
    assert names[:3] == ["a.jsonl", "a.jsonl-2", "a.jsonl-3"]
    assert len(set(names)) == len(names) == 1_100


def test_a_regular_expression_of_many_alternatives_is_left_to_be_written(tmp_path: Path) -> None:
    pattern = "x" * 100_000 + "(" + "a|" * 40_000 + "b)"
    draft = draft_of(written(tmp_path, f"{HEAD}{DATA}lora_target_modules: '{pattern}'\n"))
    assert "lora_target_modules" in draft.blanks
    parse_document(recipe_text(draft, "other.yml"), "made.toml")


def test_the_command_that_imports_ends_with_the_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        draft_of(written(tmp_path, HEAD + "learning_rate: 0x" + "f" * 5000 + "\n"))
    assert error.value.exit_code == 2 and "other.yml:5" in error.value.render()
