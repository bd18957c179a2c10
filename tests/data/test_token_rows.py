"""Rows that are tokens already: what of them is learned, and which rows are dropped or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from engine.cli import app
from engine.data.prepare import PreparedData, prepare_data
from engine.data.records import Dropped, TokenRecord
from engine.data.token_rows import token_row
from engine.errors import DataError
from tests.data.specs import run_spec, tokenizer

Write = Callable[..., str]
IDS = [104, 105, 256, 97, 98, 257]


def prepared(path: str, source: dict[str, Any] | None = None, **data: Any) -> PreparedData:
    return prepare_data(run_spec({"sources": [{"name": "a", "path": path, **(source or {})}], **data}), tokenizer())


def learned(data: PreparedData) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of each row."""
    return [(row.input_ids.tolist(), row.labels.tolist()) for row in data.train]


LABELS = [-100, -100, -100, 97, 98, 257]

WAYS: dict[str, dict[str, Any]] = {
    "labels": {"input_ids": IDS, "labels": LABELS},
    "attention mask": {"input_ids": IDS, "labels": LABELS, "attention_mask": [1] * 6},
    "padding on the right": {
        "input_ids": [*IDS, 258, 258], "labels": [*LABELS, -100, -100], "attention_mask": [1] * 6 + [0] * 2,
    },
    "padding on the left": {
        "input_ids": [258, *IDS], "labels": [-100, *LABELS], "attention_mask": [0] + [1] * 6,
        "position_ids": [0, *range(6)],
    },
    "loss mask": {"input_ids": IDS, "loss_mask": [0, 0, 0, 1, 1, 1]},
    "completion mask": {"input_ids": IDS, "completion_mask": [False, False, False, True, True, True]},
    "assistant masks": {"input_ids": IDS, "assistant_masks": [0, 0, 0, 1, 1, 1]},
    "assistant mask": {"input_ids": IDS, "assistant_mask": [0, 0, 0, 1, 1, 1]},
    "both": {"input_ids": IDS, "labels": [-100, 105, *LABELS[2:]], "loss_mask": [1, 0, 0, 1, 1, 1]},
    "JSON text": {"input_ids": json.dumps(IDS), "labels": json.dumps(LABELS)},
    "a batch of one": {"input_ids": [IDS], "labels": [LABELS]},
}  # fmt: skip


@pytest.mark.parametrize("row", WAYS.values(), ids=WAYS.keys())
def test_labels_and_masks_say_what_is_learned(row: dict[str, Any], jsonl: Write) -> None:
    assert learned(prepared(jsonl([row]))) == [(IDS, LABELS)]


def test_without_labels_all_tokens_are_learned_and_nothing_is_added(jsonl: Write) -> None:
    assert learned(prepared(jsonl([{"input_ids": IDS}]))) == [(IDS, [-100, *IDS[1:]])]


def test_columns_of_other_names_and_ambiguous_rows(jsonl: Write) -> None:
    named = {"columns": {"input_ids": "tokens", "labels": "targets"}}
    path = jsonl([{"tokens": IDS, "targets": LABELS, "text": "hi"}])
    assert learned(prepared(path, named)) == [(IDS, LABELS)]
    beside = prepared(jsonl([{"text": "hi", "input_ids": IDS}], "b.jsonl"))
    assert learned(beside)[0][0] == [104, 105, 257]
    assert any("unused columns: input_ids" in line for line in beside.report.notices)
    chosen = prepared(jsonl([{"text": "hi", "input_ids": IDS}], "b.jsonl"), {"format": "tokens"})
    assert learned(chosen)[0][0] == IDS


DROPS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"input_ids": None}, "input_ids is missing"),
    "empty": ({"input_ids": []}, "input_ids is empty"),
    "length": ({"input_ids": IDS, "labels": LABELS[1:]}, "labels is not as long as input_ids"),
    "shifted": ({"input_ids": IDS, "labels": [*IDS[1:], -100]}, "a label is neither -100 nor the token"),
    "gaps": ({"input_ids": IDS, "attention_mask": [1, 1, 0, 1, 1, 1]}, "attention_mask has zeros between ones"),
    "weights": ({"input_ids": IDS, "loss_mask": [0, 0, 0, 1, 1, 2]}, "loss_mask has other values than 0 and 1"),
    "packed": ({"input_ids": IDS, "position_ids": [0, 1, 2, 0, 1, 2]}, "position_ids do not count from 0"),
    "all padding": ({"input_ids": IDS, "attention_mask": [0] * 6}, "input_ids is empty"),
    "no target": ({"input_ids": IDS, "labels": [-100] * 6}, "no target token"),
    "long": ({"input_ids": [97] * 90, "labels": [-100, *[97] * 89]}, "longer than data.max_length"),
}


@pytest.mark.parametrize(("row", "reason"), DROPS.values(), ids=DROPS.keys())
def test_other_rows_are_dropped_with_a_reason(row: dict[str, Any], reason: str, jsonl: Write) -> None:
    path = jsonl([row, {"input_ids": IDS}])
    data = prepared(path, max_length=80)
    (found,) = data.report.sources[0].dropped_at.items()
    assert found[0].startswith(reason) and found[1] == [f"{path}:1"] and len(data.train) == 1


def test_what_is_no_list_of_numbers_drops_the_row() -> None:
    for value in ("hi", [1.5], ["1"], 3, {"a": 1}, [[1], [2]]):
        assert token_row({"input_ids": value}) == Dropped("input_ids is not a list of integers")


@pytest.mark.parametrize("token", [-1, 264, 151_936])
def test_a_token_that_the_tokenizer_lacks_is_refused_with_its_row(token: int, jsonl: Write) -> None:
    path = jsonl([{"input_ids": IDS}, {"input_ids": [97, token]}])
    with pytest.raises(DataError, match=rf"source a, row 2: input_ids has the token {token:,}") as refused:
        prepared(path)
    assert "data.broken=skip" in refused.value.fix
    data = prepared(path, broken="skip")
    assert learned(data) == [(IDS, [-100, *IDS[1:]])]
    assert data.report.sources[0].dropped == {"input_ids has a token that the tokenizer does not have": 1}


def test_long_rows_are_cut_split_and_packed_as_text_is(jsonl: Write) -> None:
    path = jsonl([{"input_ids": [*range(97, 117)]}])
    assert [ids for ids, _ in learned(prepared(path, max_length=8))] == [
        [*range(97, 105)], [*range(105, 113)], [*range(113, 117)],
    ]  # fmt: skip
    masked = jsonl([{"input_ids": [*range(97, 117)], "loss_mask": [0, 0, 0, *[1] * 17]}], "b.jsonl")
    (row,) = learned(prepared(masked, max_length=8, over_length="truncate"))
    assert row == ([*range(97, 105)], [-100] * 3 + [*range(100, 105)])
    short = jsonl([{"input_ids": IDS, "labels": LABELS}] * 3, "c.jsonl")
    packed = prepared(short, max_length=12, packing=True)
    assert sorted(len(row.input_ids) for row in packed.train) == [6, 12]


def test_tokens_are_no_conversations(jsonl: Write) -> None:
    with pytest.raises(DataError, match='template = "chat"'):
        prepared(jsonl([{"input_ids": IDS}]), {"template": "chat"})


def test_the_command_shows_their_text(jsonl: Write, tmp_path: Path) -> None:
    path = jsonl([{"input_ids": IDS, "labels": LABELS}])
    (tmp_path / "r.toml").write_text(
        'schema = 1\nkind = "recipe"\n[model]\nid = "builtin:tiny"\n[[data.sources]]\nname = "s"\n'
        + f'path = "{path}"\n'
    )
    done = CliRunner().invoke(app, ["data", "-r", str(tmp_path / "r.toml"), "--json"])
    assert done.exit_code == 0, done.output
    (sample,) = json.loads(done.stdout)["samples"]
    assert "".join(piece["text"] for piece in sample["pieces"]) == tokenizer().decode(IDS)


ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 263), st.booleans()), min_size=2, max_size=30).filter(
        lambda row: any(flag for _, flag in row[1:])
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=15, deadline=None)
@given(ROWS)
def test_what_is_learned_is_what_the_file_has(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    given = [{"input_ids": [token for token, _ in row], "labels": [token if flag else -100 for token, flag in row]}
             for row in rows]  # fmt: skip
    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), folder / "rows.parquet")
    expected = [(row["input_ids"], [-100, *row["labels"][1:]]) for row in given]
    for name in ("rows.jsonl", "rows.parquet"):
        assert learned(prepared(str(folder / name))) == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 4), st.integers(0, 4))
def test_padding_is_left_out_wherever_it_is(ids: list[int], left: int, right: int) -> None:
    mask = [0] * left + [1] * len(ids) + [0] * right
    found = token_row({"input_ids": [7] * left + ids + [8] * right, "attention_mask": mask})
    assert found == TokenRecord(tuple(ids), (True,) * len(ids))
    assert isinstance(token_row({"input_ids": ids, "attention_mask": [*mask, 1]}), Dropped)
