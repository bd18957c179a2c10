"""What is read equals, value by value, what the file has: dates, numbers, nulls, keys, line ends; and rows that were
replaced are read again."""

from __future__ import annotations

import csv
import json
import os
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from engine.config.files.data_files import read_prompts
from engine.config.schema.data import Source
from engine.data.arrow_values import shapes_of
from engine.data.dataset_files import require_texts
from engine.data.records import Dropped, SourceRows
from engine.data.sources import open_rows
from engine.errors import DataError


def opened(path: Path, *, skip_broken: bool = False, **keys: Any) -> SourceRows:
    source = Source.model_validate({"name": "s", "path": str(path), **keys})
    return open_rows(source, seed=0, skip_broken=skip_broken)


def read(rows: SourceRows) -> list[dict[str, Any]]:
    return [row for batch in rows.batches(3) for row in batch if not isinstance(row, Dropped)]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


ODD: list[dict[str, Any]] = [
    {"messages": [call("book", date="2025-01-02", when="2025-01-02T10:00:00Z")], "id": 1},
    {"messages": [call("add", x=1, y=2.5, to=None)], "id": 2**70},
    {"messages": [call("add", x=1.0, y=10**25, z=[1, None, "a"])], "id": "0012", "extra": {}},
    {"messages": [{"role": "user", "content": "\u2028\u00e9\U0001f600\x85 \r\n\t"}], "id": -0.0},
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
def test_rows_of_json_are_what_python_reads(name: str, indent: int | None, tmp_path: Path) -> None:
    """Dates stay text, whole numbers whole, and no row has a key of another one."""
    path, is_list = tmp_path / name, name == "a.json"
    path.write_text(json.dumps(ODD, indent=indent) if is_list else "\n".join(map(json.dumps, ODD)))
    found = read(opened(path))
    assert found == ODD and json.dumps(found) == json.dumps(ODD)
    assert opened(path).columns == ["messages", "id", "extra"]


def test_rows_of_a_list_longer_than_a_block_are_those_of_the_list(tmp_path: Path) -> None:
    drawn = random.Random(0)
    rows = [{"text": "é" * drawn.randint(0, 400_000), "n": number} for number in range(20)]
    (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=False, indent=2), encoding="utf-8-sig")
    assert read(opened(tmp_path / "a.json")) == rows


def test_dates_in_a_file_of_many_blocks_stay_text(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 1000, "completion": f"2021-03-{1 + number % 28:02}"} for number in range(12_000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = opened(tmp_path / "a.jsonl")
    assert found.count == len(rows)
    assert [found.row(number)["completion"] for number in (0, 11_999)] == ["2021-03-01", rows[-1]["completion"]]


@pytest.mark.parametrize(
    ("text", "words", "reason"),
    [
        ('{"text": "a", "text": "b"}', "the key 'text' occurs twice", "a key that occurs twice in one object"),
        ('{"text": {"a": 1, "a": 1}}', "the key 'a' occurs twice", "a key that occurs twice in one object"),
        ('{"text": "\\ud800"}', "half of a surrogate pair", "half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_what_no_reader_can_keep_is_refused_or_left_out(
    name: str, text: str, words: str, reason: str, tmp_path: Path
) -> None:
    path, good = tmp_path / name, '{"text": "good"}'
    path.write_text(f"[{good},\n{text}]" if name == "a.json" else f"{good}\n{text}\n")
    with pytest.raises(DataError, match=words) as caught:
        opened(path)
    assert ("element 2" if name == "a.json" else ":2:") in caught.value.found
    rows = opened(path, skip_broken=True)
    assert read(rows) == [{"text": "good"}]
    ((found, count),) = rows.left_out[0].dropped.items()
    assert found.startswith(reason) and count == 1


CELLS = [
    "0012",
    "1e5",
    "1.10",
    "2021-03-05",
    "NA",
    "true",
    " a ",
    'say "no"',
    "a,b",
    "a\nb",
    "a\rb",
    "\u2028",
    "x\x85y",
]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_cells_are_the_text_that_is_written(end: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.writer(stream, lineterminator=end)
        if end != "\r\n":  # the writer leaves the other line ends without quotes
            writer = csv.writer(stream, lineterminator=end, quoting=csv.QUOTE_ALL)
        writer.writerows([["prompt", "completion"], *([cell, cell[::-1]] for cell in CELLS)])
    assert read(opened(path)) == [{"prompt": cell, "completion": cell[::-1]} for cell in CELLS]
    assert opened(path).places([0]) == [f"{path}:2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("q1,Yes, it rains\nq2,No\n", ":2: 3 fields, but the file has 2 columns"),
        ("q1,a1\n1,q2,a2\n", ":3: 3 fields, but the file has 2 columns"),
        ('q1,"He said \\"hi\\" to me"\nq2,a2\n', ":2: no ','"),
        ("q1,a\r1\nq2,a2\n", ":2: a line break in an unquoted cell"),
        ('q1,a1\nq2,"open\nq3,a3\n', ":3: a quoted cell is not closed"),
    ],
)
def test_records_that_are_not_those_of_their_columns_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"prompt,completion\n{text}")
    with pytest.raises(DataError) as caught:
        opened(path)
    assert words in caught.value.found and "data.broken=skip" in caught.value.fix
    rows = opened(path, skip_broken=True)
    assert rows.count == text.count("\n") - rows.left_out[0].dropped.popitem()[1] - ("open" in text)


TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "parameters": {"properties": {"city": {"type": "string", "enum": None}}}},
    {"name": "mail", "parameters": {"properties": {"to": {"type": "string", "enum": None}}}},
]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved", "folder"])
def test_keys_of_other_rows_are_not_in_a_row_of_a_table(kind: str, tmp_path: Path) -> None:
    """A key that is null in every row is a row's own."""
    rows: list[dict[str, Any]] = [
        {"messages": [call("weather", city="Bergen")], "tools": TOOLS[:1]},
        {"messages": [call("mail", to="ann", at=[{"day": 1}, {"hour": 2}])], "tools": TOOLS[1:]},
        {"messages": [call("none")], "tools": None},
    ]
    data, path = datasets.Dataset.from_list(rows), tmp_path / f"a.{kind}"
    if kind == "saved":
        data.save_to_disk(str(path))
    elif kind == "arrow":
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, data.data.schema) as writer:
            writer.write_table(data.data.table)
    else:
        path = path / "train.parquet" if kind == "folder" else path
        path.parent.mkdir(exist_ok=True)
        data.to_parquet(str(path))
    found = read(opened(path.parent if kind == "folder" else path))
    assert [{key: value for key, value in row.items() if value is not None} for row in found] == [
        {key: value for key, value in row.items() if value is not None} for row in rows
    ]


def test_dates_classes_and_json_of_a_table_are_what_they_mean(tmp_path: Path) -> None:
    features = datasets.Features({
        "label": datasets.ClassLabel(names=["bad", "good"]), "many": datasets.List(datasets.ClassLabel(names=["a"])),
        "day": datasets.Value("date32"), "price": datasets.Value("decimal128(10, 2)"), "free": datasets.Json(),
    })  # fmt: skip
    import datetime
    import decimal

    row = {"label": 1, "many": [0], "day": datetime.date(2021, 3, 5), "price": decimal.Decimal("1.10")}
    data = datasets.Dataset.from_list([{**row, "free": {"a": None}}], features=features)
    data.to_parquet(str(tmp_path / "a.parquet"))
    rows = opened(tmp_path / "a.parquet")
    wanted = {"label": "good", "many": ["a"], "day": "2021-03-05", "price": "1.10", "free": {"a": None}}
    assert read(rows) == [wanted]
    assert read(rows.numbered("label")) == [{**wanted, "label": 1}]
    assert any("day, price" in notice for notice in rows.notices)


README = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: part/train*\n---\n"


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_rows_of_a_folder_are_its_own_and_the_newest(suffix: str, tmp_path: Path) -> None:
    """Two folders of one name with the same README; then a file is replaced that keeps its time of change."""

    def write(name: str, text: str) -> Path:
        file = tmp_path / name / "data" / "part" / f"train.{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "data" / "README.md").write_text(README)
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), file)
        else:
            file.write_text(json.dumps({"text": text}) if suffix == "jsonl" else f"text\n{text}\n")
        os.utime(file, (1, 1))
        return tmp_path / name / "data"

    for name, text in (("one", "one"), ("two", "two"), ("one", "new"), ("one", "one")):
        assert read(opened(write(name, text))) == [{"text": text}]
        file = next((tmp_path / name / "data" / "part").iterdir())
        assert read(opened(file)) == [{"text": text}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.txt", "*.jsonl"])
def test_a_file_has_no_splits(name: str, tmp_path: Path) -> None:
    (tmp_path / name.replace("*", "a")).write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match="has no splits, but split = 'test'") as caught:
        opened(tmp_path / name, split="test")
    assert "--set data.sources.s.split=train" in caught.value.fix
    with pytest.raises(DataError, match="has no splits"):
        opened(tmp_path / name, split="validation[:10]")


def test_a_saved_data_set_without_splits_has_none(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="has no split test"):
        opened(tmp_path / "saved", split="test")


def test_a_folder_with_several_configurations_is_read_by_one(tmp_path: Path) -> None:
    for name in ("en", "fr"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "train.jsonl").write_text(json.dumps({"text": name}))
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/train.jsonl\n" for name in ("en", "fr"))
    (tmp_path / "data" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert read(opened(tmp_path / "data", config="fr")) == [{"text": "fr"}]
    for config, words in ((None, "has 2 configurations"), ("de", "has no configuration de")):
        with pytest.raises(DataError, match=words) as caught:
            opened(tmp_path / "data", config=config)
        assert "--set data.sources.s.config=en" in caught.value.fix


def test_files_of_no_split_are_named(tmp_path: Path) -> None:
    for name in ("train", "test", "extra"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    rows = opened(tmp_path / "data", split="test")
    assert read(rows) == [{"text": "test"}]
    assert any("extra.jsonl" in notice and "train.jsonl" not in notice for notice in rows.notices)


def test_a_folder_that_lacks_files_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "part").mkdir(parents=True)
    for number in (0, 2):
        (folder / "part" / f"train-{number:05}-of-00003.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"1 are missing, such as part/train-00001-of-00003\.jsonl") as caught:
        opened(folder)
    assert "hf download --repo-type dataset" in caught.value.fix
    (folder / "part" / "train-00001-of-00003.jsonl").write_text('{"text": "b"}\n')
    assert opened(folder).count == 3
    unfinished = folder / ".cache" / "huggingface" / "download" / "x.incomplete"
    unfinished.parent.mkdir(parents=True)
    unfinished.touch()
    with pytest.raises(DataError, match="is incomplete"):
        opened(folder)


def test_files_that_a_readme_names_and_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "README.md").write_text(README)
    with pytest.raises(DataError, match="data files found") as caught:
        opened(tmp_path / "data")
    assert "hf download --repo-type dataset" in caught.value.fix


def test_dates_that_a_library_made_of_texts_are_not_learned(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "at": ["2021-03-05"]}\n')
    read_as = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "c"))
    found = SourceRows(["at"], 1, "", read_as, shapes=shapes_of(read_as.features, read_as.data))
    source = Source.model_validate({"name": "s", "hub": "owner/name"})
    with pytest.raises(DataError, match="converts texts in them to dates: at"):
        require_texts(source, found, read_as.info.builder_name)


PROMPTS: dict[str, tuple[str, list[str]]] = {
    "p.txt": ("\ufeffHello?\r\nOne\u2028line\n\n x\x85 \n", ["Hello?", "One\u2028line", " x\x85 "]),
    "p.jsonl": ('\ufeff{"prompt": "a\\nb"}\n\n"c"\n', ["a\nb", "c"]),
    "p.json": ('[\n {"prompt": "a"},\n "b"]', ["a", "b"]),
    "p.ndjson": ('{"prompt": "a"}', ["a"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    text, wanted = PROMPTS[name]
    (tmp_path / name).write_bytes(text.encode())
    assert read_prompts(tmp_path / name, "eval.prompts") == wanted


@pytest.mark.parametrize(("name", "text"), [("p.csv", "prompt\na\n"), ("p.json", '{"prompt": 1}'), ("p.jsonl", "{")])
def test_a_file_without_prompts_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=r"eval\.prompts"):
        read_prompts(tmp_path / name, "eval.prompts")
