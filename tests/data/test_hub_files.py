"""JSON and CSV files of hub data sets are read like local ones, with and without a connection."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from engine.config.files.caches import has_data_set
from engine.config.schema.data import Source
from engine.data.sources import open_rows
from engine.errors import DataError
from tests.data.data_set_hub import serving

READ = """
import json, sys
from engine.config.schema.data import Source
from engine.data.second_reader import compare_rows
from engine.data.sources import open_rows
from engine.errors import TunedeckError
try:
    rows = open_rows(Source.model_validate(json.loads(sys.argv[1])), seed=0)
    read = [row for batch in rows.batches() for row in batch]
    print(json.dumps({"rows": read, "compared": compare_rows(rows, "s"), "fingerprint": rows.fingerprint}))
except TunedeckError as error:
    print(json.dumps({"found": error.found, "expected": error.expected, "fix": error.fix}))
"""
"""In a process of its own: the libraries read the hub's address when they are imported."""

ROWS = [{"prompt": "2021-03-05", "completion": "1.0", "call": {"a": 1}},
        {"prompt": "007", "completion": "x", "call": {"b": 2**70, "none": None}}]  # fmt: skip
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
SPLITS = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: 'part/*'}\n"
CLASSES = b"""---
dataset_info:
  features:
  - {name: prompt, dtype: string}
  - name: completion
    dtype:
      class_label:
        names: {'0': 'no', '1': 'yes'}
---
"""


def read(home: Path, address: str, **keys: Any) -> dict[str, Any]:
    """What READ prints; without an address, there is no connection."""
    own = {"HF_HOME": str(home), "TUNEDECK_CACHE": str(home / "tunedeck"), "HF_HUB_OFFLINE": "0"}
    own["HF_ENDPOINT"] = address or "http://127.0.0.1:9"
    source = json.dumps({"name": "s", "hub": "owner/name", **keys})
    command = [sys.executable, "-P", "-c", READ, source]
    done = subprocess.run(command, check=False, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


FILES: dict[str, tuple[dict[str, bytes], list[dict[str, Any]]]] = {
    "lines": ({"rows.jsonl": LINES}, ROWS),
    "lines of two folders": ({"README.md": SPLITS + b"---\n", "part/a.jsonl": LINES, "other/b.jsonl": b"{}"}, ROWS),
    "a packed list": ({"data/train.json.gz": gzip.compress(json.dumps(ROWS).encode())}, ROWS),
    "cells": ({"a.csv": b"prompt,completion\n2021-03-05,1.0\n"}, [{"prompt": "2021-03-05", "completion": "1.0"}]),
    "classes": (
        {"README.md": CLASSES, "a.csv": b"prompt,completion\n007,1\n"}, [{"prompt": "007", "completion": "yes"}]
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_rows_are_those_of_the_files_with_and_without_a_connection(kind: str, tmp_path: Path) -> None:
    files, rows = FILES[kind]
    with serving("owner/name", files) as address:
        first = read(tmp_path, address)
    assert first.get("rows") == rows and first["compared"] == len(rows), first
    assert read(tmp_path, "") == first
    assert not list(tmp_path.rglob("*.arrow"))


def test_a_data_set_that_was_read_counts_as_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "tunedeck"))
    assert not has_data_set("owner/name")
    with serving("owner/name", {"rows.jsonl": LINES}) as address:
        read(tmp_path, address)
        other = read(tmp_path, address, split="test")
    assert has_data_set("owner/name") and not has_data_set("owner/name", "other")
    assert "owner/name has no split test" in other["found"] and "split=train" in other["fix"]


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    with serving("owner/name", {"rows.jsonl": LINES + b"[1]\n"}) as address:
        assert "rows.jsonl:3: expected an object" in read(tmp_path, address)["found"]


def test_tables_are_read_by_the_library(tmp_path: Path) -> None:
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), table)
    with serving("owner/name", {"data/train-00000-of-00001.parquet": table.getvalue()}) as address:
        assert read(tmp_path, address)["rows"] == [{"text": "a"}, {"text": "b"}]
    assert read(tmp_path, "")["rows"] == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("settings", "name", "words"),
    [(b"  quotechar: \"'\"\n  skiprows: 1\n", "part/a.csv", "sets skiprows, quotechar for its CSV files"),
     (b"  field: rows\n", "part/a.json", "the rows are in the field rows")],
)  # fmt: skip
def test_settings_of_a_readme_that_are_not_read_are_refused(
    tmp_path: Path, settings: bytes, name: str, words: str
) -> None:
    folder = tmp_path / "data"
    (folder / "part").mkdir(parents=True)
    (folder / "README.md").write_bytes(SPLITS + settings + b"---\n")
    (folder / name).write_bytes(b"prompt,completion\na,b\n" if name.endswith("csv") else b'{"rows": []}')
    with pytest.raises(DataError, match=words):
        open_rows(Source(name="s", path=str(folder)), seed=0)
