"""What lies beyond the bounds of docs/data.md is left out and counted, and never ends or fills the machine."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from engine.data.bounds import (
    CHARACTERS_PER_TOKEN,
    DEPTH,
    DOCUMENT_BYTES,
    IMAGE_BYTES,
    IMAGE_PIXELS,
    LINE_BYTES,
    LINE_TOO_LONG,
    TOO_DEEP,
    TOO_MANY_CHARACTERS,
    UNPACKED_BYTES,
    UNPACKED_RATIO,
    UNPACKS_TOO_FAR,
    Nesting,
)
from engine.data.prepare import prepare_data
from engine.data.records import ROW_BYTES, ROW_IMAGE_BYTES, ROW_TOO_LARGE
from engine.data.report import DataReport
from engine.errors import DataError
from tests.data.specs import run_spec, tokenizer

GOOD = '{"text": "good"}\n'
DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def report(path: Path, **data: Any) -> DataReport:
    sources = [{"name": "s", "path": str(path)}]
    return prepare_data(run_spec({"max_length": 64, "sources": sources, **data}), tokenizer()).report


def dropped(path: Path, **data: Any) -> tuple[int, dict[str, int], dict[str, list[str]]]:
    """Rows kept, the number of the others by reason, and where they are."""
    (count,) = report(path, **data).sources
    assert count.read == count.kept + sum(count.dropped.values())
    return count.kept, count.dropped, count.dropped_at


def written(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("".join(lines))
    return path


def zeros_in_gzip(path: Path, gibibytes: int) -> Path:
    """A good line, then one line of zeros, in gzip members of 64 MiB."""
    member = gzip.compress(bytes(64 << 20))
    path.write_bytes(gzip.compress(GOOD.encode()) + member * (16 * gibibytes))
    return path


@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]")])
def test_a_line_nested_fifty_thousand_deep_is_left_out(tmp_path: Path, opening: str, closing: str) -> None:
    path = written(tmp_path, "a.jsonl", GOOD, '{"text":' + opening * 50_000 + "1" + closing * 50_000 + "}\n", GOOD)
    assert dropped(path) == (2, {TOO_DEEP: 1}, {TOO_DEEP: [f"{path}:2"]})


def test_the_deepest_nesting_allowed_is_read(tmp_path: Path) -> None:
    lists = DEPTH - 1
    path = written(tmp_path, "a.jsonl", '{"text": "x", "b": ' + "[" * lists + "1" + "]" * lists + "}\n")
    assert dropped(path)[:2] == (1, {})


def test_brackets_in_a_text_are_no_nesting(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", json.dumps({"text": '[{"\\' * 9}) + "\n", json.dumps({"text": "[" * 60}) + "\n")
    assert dropped(path)[:2] == (2, {})


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_nesting_is_counted_over_pieces_that_end_anywhere(size: int) -> None:
    text = rb'[{"a\\\"[[[": ["]]]\\", {"b": []}]}, "\\"]'
    nesting = Nesting()
    for start in range(0, len(text), size):
        nesting.add(text[start : start + size])
    assert nesting.deepest == 5


def test_a_json_document_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", '[{"text":' + '{"a":' * 50_000 + "1" + "}" * 50_001 + "]")
    with pytest.raises(DataError, match=r"a\.json is one JSON document, nested more than"):
        report(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv"])
def test_a_line_of_a_hundred_megabytes_is_left_out(tmp_path: Path, name: str) -> None:
    good, long = {
        "a.jsonl": (GOOD, '{"text": "%s"}\n'),
        "a.txt": ("good\n", "%s\n"),
        "a.csv": ("good\n", '"\n%s"\n'),
    }[name]
    head = "text\n" if name == "a.csv" else ""
    path = written(tmp_path, name, head, good, long % ("x" * 100_000_000), good)
    line = 3 if head else 2
    # What is left of a text file is one document.
    kept = 1 if name == "a.txt" else 2
    assert dropped(path) == (kept, {LINE_TOO_LONG: 1}, {LINE_TOO_LONG: [f"{path}:{line}"]})


def test_rows_behind_a_line_that_is_left_out_keep_their_place(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", GOOD, "[" * 60 + "\n", '{"text": ""}\n')
    assert dropped(path)[2] == {TOO_DEEP: [f"{path}:2"], "text is empty": [f"{path}:3"]}


def test_a_folder_leaves_the_same_lines_out(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = written(tmp_path / "data", "train.jsonl", GOOD, '{"text":' + "[" * 60 + "]" * 60 + "}\n")
    for _ in range(2):
        assert dropped(tmp_path / "data") == (1, {TOO_DEEP: 1}, {TOO_DEEP: [f"{path}:2"]})


def test_a_file_with_nothing_but_such_lines_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"text":' + "[" * 60 + "]" * 60 + "}\n")
    with pytest.raises(DataError, match=rf"no rows are left; dropped: 1 x {TOO_DEEP} \({path}:1\)"):
        report(path)


def test_a_line_of_a_gigabyte_in_a_small_gzip_leaves_memory_flat(tmp_path: Path) -> None:
    path = zeros_in_gzip(tmp_path / "a.jsonl.gz", 1)
    code = (
        "import resource, sys; from pathlib import Path; from tests.data.test_bounds import dropped, report\n"
        f"report(Path({str(written(tmp_path, 'b.jsonl', GOOD))!r}))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"print(dropped(Path({str(path)!r}))[:2])\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[:1] == [str((1, {UNPACKS_TOO_FAR: 1}))], done.stderr
    assert int(done.stdout.splitlines()[1]) < 200  # MiB


def test_rows_of_a_megabyte_are_not_tokenised_where_they_would_be_dropped(tmp_path: Path) -> None:
    """3,000 of them took an hour and more, and showed no progress: 1.2 s for each megabyte."""
    path = tmp_path / "a.jsonl.gz"
    text = json.dumps({"text": "word 12 " * 125_000}) + "\n"
    with gzip.open(path, "wt", 1) as stream:
        stream.write(GOOD)
        stream.writelines([text] * 50)
    assert dropped(path, over_length="drop")[:2] == (1, {TOO_MANY_CHARACTERS: 50})


def test_a_row_of_a_megabyte_that_may_be_cut_gives_its_first_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", json.dumps({"text": "ab" * 500_000}) + "\n")
    spec = run_spec({"max_length": 64, "over_length": "truncate", "sources": [{"name": "s", "path": str(path)}]})
    prepared = prepare_data(spec, tokenizer())
    assert str(tokenizer().decode(prepared.train[0].input_ids)).endswith("ab" * 31)
    assert prepared.report.sources[0].truncated == 1


def test_a_row_beyond_its_bound_is_left_out_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": ["good", os.urandom(ROW_BYTES // 2).hex() + "x", "good"]}), path)
    assert dropped(path) == (2, {ROW_TOO_LARGE: 1}, {ROW_TOO_LARGE: ["row 2"]})


def test_a_table_that_unpacks_too_far_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    same = pa.DictionaryArray.from_arrays(pa.array([0] * 3_000, pa.int8()), pa.array(["x" * 100_000]))
    pa.parquet.write_table(pa.table({"text": same.cast(pa.string())}), path)
    with pytest.raises(DataError, match=r"a\.parquet unpacks to more than 200 times its size"):
        report(path)


def test_a_source_that_is_a_pipe_or_a_device_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    for path in (tmp_path / "a.jsonl", Path("/dev/zero")):
        with pytest.raises(DataError, match="neither a file nor a folder"):
            report(path)


def test_the_page_states_every_bound() -> None:
    page = DOCS.read_text()
    stated = {
        f"{LINE_BYTES >> 20} MiB", f"{ROW_BYTES >> 20} MiB", f"{ROW_IMAGE_BYTES >> 20} MiB", f"{DEPTH} levels",
        f"{DOCUMENT_BYTES >> 30} GiB", f"{UNPACKED_RATIO} times", f"{UNPACKED_BYTES >> 30} GiB",
        f"{CHARACTERS_PER_TOKEN} characters", f"{IMAGE_BYTES >> 20} MiB", f"{IMAGE_PIXELS:,} pixels",
    }  # fmt: skip
    assert not [bound for bound in stated if not re.search(re.escape(bound), page)]
