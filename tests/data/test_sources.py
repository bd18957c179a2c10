"""Real files of every kind through the real `datasets`; broken ones are named with file and line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from engine.config.schema.data import Source
from engine.data.records import Dropped, SourceRows
from engine.data.sources import open_rows
from engine.errors import DataError

ROWS = [{"prompt": f"p{number}", "completion": f"c{number}"} for number in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def source(path: Path | str, **keys: Any) -> Source:
    return Source.model_validate({"name": "s", "path": str(path), **keys})


def read(rows: SourceRows) -> list[dict[str, Any]]:
    return [row for batch in rows.batches(2) for row in batch if not isinstance(row, Dropped)]


def write(folder: Path, kind: str) -> Path:
    """ROWS as a file or folder of one kind."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text(LINES)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(LINES.encode()))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind in ("csv", "tsv"):
        comma = "," if kind == "csv" else "\t"
        path.write_text("".join(comma.join(cells) + "\n" for cells in [list(ROWS[0]), *(row.values() for row in ROWS)]))
    elif kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, pa.Table.from_pylist(ROWS).schema) as writer:
            writer.write_table(pa.Table.from_pylist(ROWS))
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "tsv", "parquet", "arrow", "saved"])
def test_every_kind_of_file_gives_its_rows(tmp_path: Path, kind: str) -> None:
    assert read(open_rows(source(write(tmp_path, kind)), seed=0)) == ROWS


def test_a_local_file_is_read_without_asking_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)  # offline it asks nobody
    monkeypatch.setattr("datasets.load.get_session", lambda: asked.append("a session"))
    assert read(open_rows(source(write(tmp_path, "jsonl")), seed=0)) == ROWS
    assert asked == []


def test_text_gives_one_row_per_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert read(open_rows(source(tmp_path / "a.txt", unit="line"), seed=0)) == [{"text": "one"}, {"text": "two"}]


def test_a_glob_and_a_folder_read_all_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number, row in enumerate(ROWS):
        (folder / f"train-{number}.jsonl").write_text(json.dumps(row))
    assert read(open_rows(source(folder / "*.jsonl"), seed=0)) == ROWS
    assert read(open_rows(source(folder), seed=0)) == ROWS


def test_splits_of_a_saved_data_set_and_slices(tmp_path: Path) -> None:
    parts = {"train": datasets.Dataset.from_list(ROWS), "dev": datasets.Dataset.from_list(ROWS[:2])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert open_rows(source(tmp_path / "saved", split="dev"), seed=0).count == 2
    assert read(open_rows(source(tmp_path / "saved", split="train[1:3]"), seed=0)) == ROWS[1:3]
    with pytest.raises(DataError, match="has no split test"):
        open_rows(source(tmp_path / "saved", split="test"), seed=0)


def test_limit_and_slice_take_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    assert read(open_rows(source(path, limit=2), seed=0)) == ROWS[:2]
    assert read(open_rows(source(path, split="train[:60%]"), seed=0)) == ROWS[:3]


def test_the_fingerprint_follows_the_contents_and_not_the_path(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    here, there = write(tmp_path, "jsonl"), write(tmp_path / "elsewhere", "jsonl")
    first = open_rows(source(here), seed=0).fingerprint
    assert open_rows(source(there), seed=0).fingerprint == first
    there.write_text(LINES.replace("p4", "q4"))
    assert open_rows(source(there), seed=0).fingerprint != first


def test_generated_dates_are_disjoint_repeatable_and_obey_slices() -> None:
    train = read(open_rows(source("builtin:dates"), seed=1))
    held_out = read(open_rows(source("builtin:dates", split="validation"), seed=1))
    assert (len(train), len(held_out)) == (20_000, 256)
    assert not {row["completion"] for row in train} & {row["completion"] for row in held_out}
    assert read(open_rows(source("builtin:dates", split="train[:3]"), seed=1)) == train[:3]
    assert read(open_rows(source("builtin:dates", split="train[:3]"), seed=2)) != train[:3]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": "torn\n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "ok"}\n\n[1, 2]\n', "a.jsonl:3: expected an object, found a list"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', "a.jsonl:2: not JSON (not UTF-8 text)"),
        ("a.json", b'[\n{"text": "ok"},\n{"text" "x"}\n]', "a.json:3: not JSON"),
        ("a.csv", b"text\nok\ncaf\xe9\n", "a.csv:3: not UTF-8 text"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n\n", "has no rows"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"text\n", "has no rows"),
        ("a.parquet", b"PAR1 not really", "cannot be read"),
        ("a.arrow", b"nonsense", "cannot be read"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz"),
        ("a.csv.gz", b"not gzip", "a.csv.gz"),
        ("a.bin", b"x", "unknown suffix"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(open_rows(source(tmp_path / name), seed=0))
    assert words in caught.value.found
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"path": "{tmp}/missing.jsonl"}, "does not exist"),
        ({"path": "{tmp}/*.jsonl"}, "no file matches"),
        ({"path": "{tmp}"}, "has no files"),
        ({"path": "builtin:poems"}, "builtin:poems has no split"),
        ({"path": "builtin:dates", "split": "test"}, "has no split test"),
        ({"path": "builtin:dates", "split": "train[[0]"}, "is not a valid split"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(tmp_path: Path, keys: dict[str, str], words: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=words.replace("[", "\\[")):
        open_rows(source(**{key: value.format(tmp=empty) for key, value in keys.items()}), seed=0)


def test_files_of_two_formats_do_not_make_one_source(tmp_path: Path) -> None:
    write(tmp_path, "jsonl")
    write(tmp_path, "csv")
    with pytest.raises(DataError, match="several formats"):
        open_rows(source(tmp_path / "rows.*"), seed=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    path.chmod(0)
    with pytest.raises(DataError, match="permission denied"):
        open_rows(source(path), seed=0)


def test_a_hub_name_without_a_connection_is_an_environment_problem() -> None:
    # A process of its own: huggingface_hub reads the switch when it is imported.
    code = (
        "from engine.data.sources import open_rows; from engine.config.schema.data import Source\n"
        "from engine.errors import EnvironmentProblem\n"
        "try: open_rows(Source(name='s', hub='nobody/nothing'), seed=0)\n"
        "except EnvironmentProblem as error: print(error.exit_code, error.render())"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.startswith("6 source s: the hub cannot be reached for nobody/nothing"), done.stderr
    assert "fix: connect" in done.stdout


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    code = (
        "from engine.data.sources import open_rows; from engine.config.schema.data import Source\n"
        "from engine.errors import EnvironmentProblem\n"
        "try: open_rows(Source(name='s', hub='nobody/nothing'), seed=0)\n"
        "except EnvironmentProblem as error: print(error.render())"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "the hub cannot be reached for nobody/nothing" in done.stdout, done.stderr
    assert "--set data.sources.s.path=data" in done.stdout
    assert "Retrying" not in done.stderr


def test_rows_of_json_files_are_found_by_file_and_line(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    second.write_text('{"text": "c"}\n')
    rows = open_rows(source(tmp_path / "*.jsonl"), seed=0)
    assert rows.places([1, 2]) == [f"{first}:3", f"{second}:1"]
    assert open_rows(source(tmp_path / "*.jsonl", split="train[1:]"), seed=0).places([0]) == [f"{first}:3"]
    document = tmp_path / "rows.json"
    document.write_text('[{"text": "a"},\n {"text": "b"}]')
    assert open_rows(source(document), seed=0).places([1]) == [f"{document}:2"]
