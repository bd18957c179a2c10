"""The table with which docs/data.md begins: each row of it is prepared, and the model sees and learns what it says."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable

import pytest

from engine.data.prepare import prepare_data
from tests.data.specs import run_spec, tokenizer
from tests.docs.blocks import ROOT

CELL = re.compile(r"`([^`]*)`")


def rows_of_the_page() -> list[list[str]]:
    """(row, settings, what the model sees, what counts) of each row of the first table."""
    lines = (ROOT / "docs" / "data.md").read_text("utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| --- "))
    table = lines[first + 1 : lines.index("", first)]
    return [["".join(CELL.findall(cell)) for cell in line.strip("|").split("|")] for line in table]


ROWS = rows_of_the_page()


def test_the_page_begins_with_the_table() -> None:
    assert len(ROWS) >= 15 and all(len(cells) == 4 for cells in ROWS)


@pytest.mark.parametrize(("row", "settings", "seen", "learned"), ROWS)
def test_a_row_is_seen_and_learned_as_the_table_says(
    row: str, settings: str, seen: str, learned: str, jsonl: Callable[..., str]
) -> None:
    given = tomllib.loads(settings)
    source = {"name": "a", "path": jsonl([json.loads(row)]), **{key: given[key] for key in given if key != "data"}}
    (found,) = prepare_data(run_spec({"sources": [source], **given.get("data", {})}), tokenizer()).train
    said = tokenizer().decode(found.input_ids), tokenizer().decode(found.labels[found.labels != -100])
    assert said == (seen.replace("⏎", "\n"), learned.replace("⏎", "\n"))
