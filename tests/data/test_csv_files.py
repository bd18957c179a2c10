"""Cells of CSV files are text as they stand; and files of other kinds, each with what to do about it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from engine.errors import DataError
from tests.data.test_odd_files import ROW, lines, opened, prepared, read


def written(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_cells_are_text_as_they_stand_and_missing_where_they_are_empty(tmp_path: Path, packed: bool) -> None:
    text = "prompt,completion\nNA,None\n007,1.50\ntrue,2024-01-05\na,\n"
    path = written(tmp_path, "a.csv.gz", gzip.compress(text.encode())) if packed else written(tmp_path, "a.csv", text)
    wanted: list[tuple[Any, Any]] = [("NA", "None"), ("007", "1.50"), ("true", "2024-01-05"), ("a", None)]
    assert read(opened(path)) == [{"prompt": prompt, "completion": completion} for prompt, completion in wanted]
    assert prepared(path).report.sources[0].dropped == {"completion is missing": 1}


def test_a_folder_of_csv_files_is_text_too(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        written(tmp_path, f"data/{name}.csv", "prompt,completion\n1,2\n")
    assert read(opened(tmp_path / "data")) == [{"prompt": "1", "completion": "2"}] * 2


def test_columns_without_a_name_or_with_the_same_one_are_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "\ufeff,prompt,prompt,completion\n0,a,b,c\n")
    assert read(opened(path)) == [{"Unnamed: 0": "0", "prompt": "a", "prompt.1": "b", "completion": "c"}]


def test_a_spreadsheet_may_name_its_separator(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "sep=;\r\nprompt;completion\r\na,b;c\r\n")
    assert read(opened(path)) == [{"prompt": "a,b", "completion": "c"}]


def test_whole_numbers_are_answers(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", lines({"prompt": "a", "completion": 3}, {"prompt": "b", "completion": True}))
    (count,) = prepared(path).report.sources
    assert count.kept == 1 and count.dropped == {"completion is not text": 1}


def parquet(**columns: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return bytes(sink.getvalue())


TEXTS = pyarrow.array(["a", "b"])
READ: dict[str, bytes] = {
    "large_string": parquet(prompt=TEXTS.cast(pyarrow.large_string()), completion=TEXTS),
    "dictionary": parquet(prompt=TEXTS, completion=TEXTS.dictionary_encode()),
    "string_view": parquet(prompt=TEXTS.cast(pyarrow.string_view()), completion=TEXTS),
}


@pytest.mark.parametrize("content", READ.values(), ids=READ.keys())
def test_every_kind_of_text_column_is_read(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, "a.parquet", content)
    assert read(opened(path)) == [{"prompt": text, "completion": text} for text in "ab"]


COLUMNS = json.dumps({"prompt": {"0": "a", "1": "b"}, "completion": {"0": "c", "1": "d"}})

REFUSED: dict[str, tuple[str, bytes, str, str]] = {
    "never packed": ("a.jsonl.gz", lines(ROW).encode(), "cannot be unpacked", "remove the compression suffix"),
    "cut": ("a.jsonl.gz", gzip.compress(lines(ROW).encode())[:-9], "cannot be unpacked", "copy it again"),
    "no rows": ("a.parquet", parquet(prompt=TEXTS[:0], completion=TEXTS[:0]), "has no rows", "check the file"),
    "UTF-16": ("a.csv", "prompt,completion\na,b\n".encode("utf-16"), "not UTF-8", "iconv -f utf-16 -t utf-8"),
    "a spreadsheet": ("a.xlsx", b"PK\x03\x04", "unknown suffix", "save the sheet as a CSV file"),
    "a pickle": ("a.pkl", b"\x80", "unknown suffix", "pandas.read_pickle"),
    "columns of pandas": ("a.json", COLUMNS.encode(), "no sample", "orient='records', lines=True"),
    "rows in an object": (
        "a.json", json.dumps({"n": 1, "data": [ROW, ROW]}).encode(), "no known format", "jq -c '.data[]'",
    ),
    "other letters": (
        "a.jsonl", lines({"Question": "a", "Answer": "b"}).encode(), "no known format",
        """add --set 'data.sources.s.columns={prompt = "Question", completion = "Answer"}'""",
    ),
    "one column": ("a.jsonl", lines({"content": "a"}).encode(), "no known format", 'columns = {text = "content"}'),
    "a bare conversation": (
        "a.jsonl", b'[{"role": "user", "content": "a"}]\n' * 2, '{"messages": [...]} is expected', "correct",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "found", "fix"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_is_refused_with_what_makes_rows_of_it(
    tmp_path: Path, name: str, content: bytes, found: str, fix: str
) -> None:
    with pytest.raises(DataError) as refused:
        prepared(written(tmp_path, name, content))
    assert found in refused.value.found and fix in refused.value.fix
