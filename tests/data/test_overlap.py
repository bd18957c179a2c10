"""Held-out rows that are training rows, too, exactly or nearly: what is counted, shown and kept in the cache."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from engine.budget.advise.row_notes import notes_on_rows
from engine.cli import app
from engine.data import overlap
from engine.data.overlap import Overlap, find_overlap
from engine.data.prepare import PreparedData, prepare_data
from engine.data.tokens import Columns, TokenData
from tests.data.specs import run_spec, tokenizer

Write = Callable[..., str]
LETTERS = random.Random(0)
WORDS = ["".join(LETTERS.choices("abcdefghijklmnopqrstuvwxyz", k=LETTERS.randint(3, 9))) for _ in range(2_000)]


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=20)) + f" {number}" for number in range(count)]


def prepared(train: str, held_out: str | None = None, **data: Any) -> PreparedData:
    own = [{"name": "held", "path": held_out}] if held_out else []
    return prepare_data(run_spec({"sources": [{"name": "a", "path": train}], "validation": own, **data}), tokenizer())


def test_exact_and_near_rows_are_counted(jsonl: Write) -> None:
    texts = sentences(40)
    near = texts[3].replace(texts[3].split()[5], "mist", 1)
    other = sentences(4, seed=1)
    held = [texts[0], texts[1], near, *other]
    data = prepared(jsonl([{"text": text} for text in texts]), jsonl([{"text": text} for text in held], "held.jsonl"))
    (found,) = data.overlaps
    assert (found.part, found.other, found.rows, found.exact, found.near) == ("validation", "train", 7, 2, 1)
    assert [(pair.document, pair.other) for pair in found.pairs] == [(0, 0), (1, 1), (2, 3)]
    assert found.pairs[0].similarity == 1 and 0.7 <= found.pairs[2].similarity < 1
    (line,) = [line for line in data.report.lines() if "validation: " in line and "rows" in line]
    assert line.startswith("WARNING: validation: 2 of 7 rows are also in the training data; near-duplicates: 1")


def test_other_rows_are_said_to_be_other_rows(jsonl: Write) -> None:
    held = jsonl([{"text": text} for text in sentences(5, seed=9)], "held.jsonl")
    data = prepared(jsonl([{"text": text} for text in sentences(40)]), held)
    assert data.overlaps[0].line() == "validation: none of 5 rows is equal or similar to a row of the training data"
    assert data.overlaps[0].line() in data.report.lines()


def test_a_system_prompt_that_all_rows_share_makes_them_no_duplicates(jsonl: Write) -> None:
    def rows(texts: list[str]) -> list[dict[str, Any]]:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
        return [{"system": "You are a pirate. " * 20, "messages": [{**turns[0], "content": text}, turns[1]]}
                for text in texts]  # fmt: skip

    train, held = jsonl(rows(sentences(60))), jsonl(rows(sentences(6, seed=5)), "held.jsonl")
    assert prepared(train, held).overlaps[0].near == 0


def test_the_validation_split_of_rows_that_repeat_is_warned_of(jsonl: Write) -> None:
    path = jsonl([{"text": text} for text in sentences(20)] * 2)
    (found,) = prepared(path, valid_fraction=0.3).overlaps
    assert found.exact > 0 and found.rows == 12
    assert prepared(jsonl([{"text": "alone"}], "c.jsonl")).overlaps == []


def test_pairs_and_turns_of_a_row_count_as_one_row(jsonl: Write) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 3
    path = jsonl([{"messages": turns}, {"messages": turns[:2]}])
    from tests.data.specs import FORGETFUL

    spec = run_spec({"sources": [{"name": "a", "path": path}], "validation": [{"name": "h", "path": path}]})
    data = prepare_data(spec, tokenizer(FORGETFUL))
    assert len(data.train) == 4
    assert (data.overlaps[0].rows, data.overlaps[0].exact) == (2, 2)


def test_what_was_found_is_kept_and_the_plan_repeats_it(jsonl: Write, own_cache: Path) -> None:
    path = jsonl([{"text": text} for text in sentences(20)])
    spec = run_spec({"sources": [{"name": "a", "path": path}], "validation": [{"name": "h", "path": path}]})
    first = prepare_data(spec, tokenizer())
    (entry,) = (own_cache / "overlap").iterdir()
    changed = json.loads(entry.read_text())
    changed[0]["near"] = 7
    entry.write_text(json.dumps(changed))
    assert prepare_data(spec, tokenizer()).overlaps[0].near == 7
    assert notes_on_rows(spec.recipe)[0] == first.overlaps[0].line()
    entry.write_text("torn")
    assert prepare_data(spec, tokenizer()).overlaps == first.overlaps


@pytest.fixture
def recipe(jsonl: Write, tmp_path: Path) -> str:
    texts = sentences(30)
    near = texts[2].replace(texts[2].split()[5], "mist", 1)
    train = jsonl([{"text": text} for text in texts])
    held = jsonl([{"text": texts[7]}, {"text": near}], "held.jsonl")
    scored = jsonl([{"text": texts[7]}, {"text": "new"}], "scored.jsonl")
    (tmp_path / "r.toml").write_text(
        'schema = 1\nkind = "recipe"\n[model]\nid = "builtin:tiny"\n'
        f'[data]\nsources = [{{name = "s", path = "{train}"}}]\n'
        f'validation = [{{name = "h", path = "{held}"}}]\n[evaluate]\nsources = [{{name = "e", path = "{scored}"}}]\n'
    )
    return str(tmp_path / "r.toml")


def test_the_command_shows_pairs_with_their_lines(recipe: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["data", "-r", recipe, "--duplicates"])
    assert done.exit_code == 0, done.output
    assert f"validation, h, {tmp_path}/held.jsonl:1\n" in done.stdout
    assert f"train, s, {tmp_path}/rows.jsonl:8\nequal\n" in done.stdout
    assert f"train, s, {tmp_path}/rows.jsonl:3\n" in done.stdout and "% similar" in done.stdout
    assert f"evaluation, e, {tmp_path}/scored.jsonl:1\n" in done.stdout


def test_the_documents_have_the_figures(recipe: str) -> None:
    done = CliRunner().invoke(app, ["data", "-r", recipe, "--json"])
    document = json.loads(done.stdout)
    assert [(each["part"], each["other"], each["exact"], each["near"]) for each in document["overlap"]] == [
        ("validation", "train", 1, 1), ("evaluation", "train", 1, 0), ("evaluation", "validation", 1, 0),
    ]  # fmt: skip
    assert document["duplicates"][0]["held_out"]["source"] == "h"
    assert document["duplicates"][0]["similarity"] == 1


def columns_of(rows: list[list[int]]) -> TokenData:
    lengths = np.array([len(row) for row in rows], np.int32)
    none = np.zeros(len(rows), np.int32)
    ids = np.array([token for row in rows for token in row], np.int32)
    columns = Columns(
        ids, np.ones(len(ids), np.bool_), np.append(0, np.cumsum(lengths)), lengths, none.astype(np.int16),
        np.arange(len(rows)), none, none, none.astype(np.bool_),
    )  # fmt: skip
    return TokenData(columns, np.arange(len(rows)), source_names=["a"])


def jaccard(first: list[int], second: list[int]) -> float:
    runs = [{tuple(row[place : place + 3]) for place in range(max(1, len(row) - 2))} for row in (first, second)]
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


ROW = st.lists(st.integers(0, 400), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=3), st.lists(ROW, min_size=1, max_size=6), st.data())
def test_what_is_found_is_so(train: Any, held: Any, data: st.DataObject) -> None:
    held = [*held, *data.draw(st.lists(st.sampled_from(train), max_size=4))]
    found = overlap._between("validation", overlap._Rows(columns_of(held)), "train", overlap._Rows(columns_of(train)))
    assert found.exact == sum(row in train for row in held)
    near = [pair for pair in found.pairs if held[pair.document] != train[pair.other]]
    assert len(near) == found.near
    for pair in near:
        assert pair.similarity == pytest.approx(jaccard(held[pair.document], train[pair.other]), abs=1e-3)
    alike = [
        row for row in held if row not in train and len(row) > 8 and any(jaccard(row, other) > 0.9 for other in train)
    ]
    assert len(near) >= len(alike)


def test_long_data_are_searched_in_part_and_the_line_says_so(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    rows = [[*range(start, start + 30)] for start in range(0, 4000, 40)]
    monkeypatch.setattr(overlap, "SEARCHED_TOKENS", 1500)
    monkeypatch.setattr(overlap, "CHUNK_TOKENS", 200)
    parts = [("train", columns_of(rows)), ("validation", columns_of([[*row[:-1], 9999] for row in rows[:10]]))]
    (found,) = find_overlap(parts, ["key"])
    assert isinstance(found, Overlap) and found.searched == 0.5 and found.near == 5
    assert f"(searched: {100 * found.searched:.0f} %)" in found.line()
