"""A second, plain reading of the files: whatever is written, in whatever format, is what is tokenised; a first reader
that is wrong is caught, with the row, the key and both values; and the accounts of a source add up."""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.config.schema.data import Source
from engine.data.file_rows import FileRows, _index_of
from engine.data.prepare import prepare_data
from engine.data.records import Dropped, SourceRows
from engine.data.second_reader import compare_rows
from engine.data.sources import open_rows
from engine.errors import DataError
from tests.data.specs import run_spec, tokenizer

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.dates().map(str), st.datetimes().map(str), st.integers().map(str), st.floats(allow_nan=False).map(str),
    st.sampled_from(["007", "1.10", "1e5", "NA", "null", "None", "true", "\u2028", "a\r\nb", "\x85", "\ufeff", '"']),
)  # fmt: skip
leaves = st.one_of(texts, st.integers(-(2**80), 2**80), st.floats(allow_nan=False), st.booleans(), st.none())
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
calls = st.fixed_dictionaries({"name": texts, "arguments": st.dictionaries(texts, values, max_size=3)})
nested_rows = st.lists(
    st.fixed_dictionaries({"prompt": texts, "completion": texts}, optional={"calls": calls, "n": values}),
    min_size=1, max_size=5,
)  # fmt: skip
flat_rows = st.lists(st.fixed_dictionaries({"prompt": texts, "completion": texts}), min_size=1, max_size=5)

FIXED = {"a": st.integers(-5, 5), "b": st.floats(allow_nan=False, width=32), "day": st.dates().map(str), "c": texts}
struct_rows = st.lists(
    st.fixed_dictionaries({
        "prompt": texts, "completion": texts,
        "calls": st.lists(st.fixed_dictionaries({"name": texts}, optional=FIXED), min_size=1, max_size=2),
    }),
    min_size=1, max_size=4,
)  # fmt: skip
"""Rows whose objects have different keys, none of them null, as a table can have them."""

README = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: part/*\n---\n"
JSON_KINDS = ["jsonl", "json", "jsonl.gz", "jsonl.zst", "folder"]
TABLE_KINDS = ["parquet", "arrow", "saved", "table folder"]

quick = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def written(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    """`rows` as a file or folder of one kind."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path = folder / f"rows.{kind}"
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "jsonl.zst":
        with pyarrow.output_stream(str(path), compression="zstd") as stream:
            stream.write(lines)
    elif kind == "json":
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as opened:
            csv.writer(opened).writerows([list(rows[0]), *([row[name] for name in rows[0]] for row in rows)])
    elif kind == "folder":
        (path / "part").mkdir(parents=True)
        (path / "part" / "a.jsonl").write_bytes(lines)
        (path / "README.md").write_text(README)
    elif kind in TABLE_KINDS:
        return written_table(path, kind, datasets.Dataset.from_list(rows))
    else:
        path.write_bytes(lines)
    return path


def written_table(path: Path, kind: str, data: datasets.Dataset) -> Path:
    if kind == "saved":
        data.save_to_disk(str(path))
    elif kind == "arrow":
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, data.data.schema) as writer:
            writer.write_table(data.data.table)
    elif kind == "parquet":
        data.to_parquet(str(path))
    else:
        (path / "part").mkdir(parents=True)
        data.to_parquet(str(path / "part" / "a.parquet"))
        (path / "README.md").write_text(README)
    return path


def opened(path: Path, **keys: Any) -> SourceRows:
    return open_rows(Source.model_validate({"name": "s", "path": str(path), **keys}), seed=0)


def read(rows: SourceRows) -> list[dict[str, Any]]:
    return [row for batch in rows.batches(2) for row in batch if not isinstance(row, Dropped)]


def same(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> bool:
    """Also in the order of keys, and in types that Python takes for equal."""
    return json.dumps(found) == json.dumps(rows)


@pytest.mark.parametrize("kind", JSON_KINDS)
@quick
@given(rows=nested_rows)
@example(rows=[{"prompt": "a", "completion": "2021-03-05", "n": 1}, {"prompt": "b", "completion": "c", "n": 1.0}])
def test_rows_of_json_are_those_that_were_written(kind: str, rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = opened(written(Path(folder), kind, rows))
        assert same(read(found), rows)
        assert compare_rows(found, "s") == len(rows)


@quick
@given(rows=flat_rows)
def test_cells_are_those_that_were_written(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = opened(written(Path(folder), "csv", rows))
        names = list(rows[0])
        assert same(read(found), [{name: row[name] or None for name in names} for row in rows])
        assert compare_rows(found, "s") == len(rows)


@pytest.mark.parametrize("kind", TABLE_KINDS)
@settings(quick, max_examples=8)
@given(rows=struct_rows)
def test_rows_of_a_table_are_those_that_were_written(kind: str, rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = opened(written(Path(folder), kind, rows))
        got, wanted = (json.dumps(each, sort_keys=True) for each in (read(found), rows))  # a table has an order of keys
        assert got == wanted
        assert compare_rows(found, "s") == len(rows)


ROWS = [{"prompt": f"p{number}", "completion": {"date": f"2021-03-{number % 28 + 1:02}"}} for number in range(1500)]


def test_a_wrong_value_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "jsonl", ROWS)
    rows, whole = opened(path), FileRows.__getitem__

    def with_a_time(table: FileRows, part: slice) -> list[dict[str, Any]]:
        return [{**row, "completion": {"date": row["completion"]["date"] + " 00:00:00"}} for row in whole(table, part)]

    assert compare_rows(rows, "s") > 100
    monkeypatch.setattr(FileRows, "__getitem__", with_a_time)
    with pytest.raises(DataError) as caught:
        compare_rows(rows, "s")
    assert "key completion.date was read as '2021-03-01 00:00:00' and as '2021-03-01'" in caught.value.found
    assert "rows.jsonl:1" in caught.value.found and "start again" in caught.value.fix


@pytest.mark.parametrize("how", ["moved", "fewer", "more"])
def test_a_wrong_index_is_caught_and_removed(how: str, tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", ROWS)
    assert opened(path).origin is not None
    (index,) = (tmp_path / "cache" / "screened").glob("*.rows")
    note = index.with_suffix(".json")
    spans = np.fromfile(index, np.int64).reshape(-1, 3)
    spans = {"moved": np.roll(spans, 1, axis=0), "fewer": spans[:-1], "more": np.vstack([spans, spans[-1:]])}[how]
    index.unlink()  # what is mapped already stays as it was
    spans.tofile(index)
    note.write_text(json.dumps({**json.loads(note.read_text()), "count": len(spans)}))
    _index_of.cache_clear()
    with pytest.raises(DataError, match="source s: "):
        prepare_data(run_spec({"sources": [{"name": "s", "path": str(path)}]}), tokenizer())
    _index_of.cache_clear()
    assert same(read(opened(path)), ROWS)


def test_a_table_of_other_rows_is_caught(tmp_path: Path) -> None:
    """As `datasets` would serve from a cache."""
    path = written(tmp_path, "parquet", [{"text": "old"}])
    rows = opened(path)
    datasets.Dataset.from_list([{"text": "new"}]).to_parquet(str(path))
    with pytest.raises(DataError, match="key text was read as 'old' and as 'new'"):
        compare_rows(rows, "s")


def test_a_file_that_changes_while_it_is_read_ends_the_reading(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", ROWS)
    rows = opened(path)
    path.write_bytes(path.read_bytes().replace(b"p1", b"q1"))
    with pytest.raises(DataError, match="was changed while it was read"):
        rows.row(1)


def broken_lines() -> Iterator[str]:
    for number in range(600):
        yield json.dumps({"prompt": f"p{number}", "completion": "c", "meta": 1})
        if number % 7 == 0:
            yield ["{torn", "[1]", "", '{"a": 1, "a": 2}', '{"a": "\\ud800"}', "[" * 60 + "]" * 60][number % 6]


def test_rows_are_counted_to_the_last_one(tmp_path: Path) -> None:
    lines = list(broken_lines())
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = {"name": "s", "path": str(tmp_path / "a.jsonl"), "limit": 500, "template": "none"}
    report = prepare_data(run_spec({"sources": [source], "broken": "skip", "max_length": 5}), tokenizer()).report
    (count,) = report.sources
    assert count.read + count.unused == sum(bool(line) for line in lines)
    assert count.read == count.kept + sum(count.dropped.values()) and count.unused == 100
    assert (count.columns_read, count.columns_not_read) == (["prompt", "completion"], ["meta"])
    assert count.compared > 100
    assert count.tokens == count.learned_tokens + count.context_tokens + count.lost_tokens
    assert count.lost_tokens > 0 and count.learned_tokens > 0
    (line,) = report.accounts()
    assert "rows in the file = " in line and "not read: meta" in line and "tokens in = " in line
    assert report.as_json()["accounts"] == [line]
