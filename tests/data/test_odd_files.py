"""Files as people have them: a folder with other files beside its data, separators, an object per file, types that
change from row to row, broken lines that are left out and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config.schema.data import Source
from engine.data.prepare import PreparedData, prepare_data
from engine.data.records import Dropped, SourceRows
from engine.data.sources import open_rows
from engine.data.tokens import IGNORED
from engine.errors import DataError
from engine.model.tokenizer import load_tokenizer
from tests.data.specs import run_spec, tokenizer

Write = Callable[..., str]
ROW = {"prompt": "a", "completion": "b"}
SETTINGS = json.dumps({"width": 3, "names": {"x": 1}}, indent=1)


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def opened(path: Path, **keys: Any) -> SourceRows:
    return open_rows(Source.model_validate({"name": "s", "path": str(path)}), seed=0, **keys)


def read(rows: SourceRows) -> list[dict[str, Any]]:
    return [row for batch in rows.batches() for row in batch if not isinstance(row, Dropped)]


def folder(tmp_path: Path, **files: str) -> Path:
    made = tmp_path / "folder"
    for name, text in files.items():
        file = made / name.replace("__", "/").replace("_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return made


def prepared(path: Path, **data: Any) -> PreparedData:
    return prepare_data(run_spec({"sources": [{"name": "s", "path": str(path)}], **data}), tokenizer())


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "train/rows.jsonl"])
def test_a_readme_and_settings_beside_the_data_are_not_read_and_said(name: str, tmp_path: Path) -> None:
    rows = "prompt,completion\na,b\n" if name.endswith("csv") else lines(ROW)
    made = folder(tmp_path, **{name.replace("/", "__").replace(".", "_"): rows})
    beside = made / name
    (beside.parent / "settings.json").write_text(SETTINGS)
    (beside.parent / "empty.json").write_text("[]")
    (made / "README.md").write_text("# About")
    found = opened(made)
    assert read(found) == [ROW]
    assert "settings.json" in found.notices[0] and "README.md" in found.notices[0]
    assert any("settings.json" in notice for notice in prepared(made).report.notices)


def test_a_readme_beside_text_is_no_document_but_documents_may_be_called_so(tmp_path: Path) -> None:
    made = folder(tmp_path, a_txt="hello", README_md="# About")
    assert [row["text"] for row in read(opened(made))] == ["hello"]
    assert [row["text"] for row in read(opened(made, version=2))] == ["# About", "hello"]
    (made / "a.txt").unlink()
    assert [row["text"] for row in read(opened(made))] == ["# About"]


def test_tables_of_several_formats_in_a_folder_are_refused_where_one_would_be_lost(tmp_path: Path) -> None:
    made = folder(tmp_path, a_csv="prompt,completion\na,b\n", b_jsonl=lines(ROW))
    with pytest.raises(DataError, match=r"tables of several formats \(.csv, .jsonl\)"):
        opened(made)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_another_separator_is_seen_in_the_first_line(separator: str, tmp_path: Path) -> None:
    text = f'prompt{separator}completion\n"x{separator}y, z"{separator}b\n'
    made = folder(tmp_path, a_csv=text)
    for path in (made, made / "a.csv"):
        assert read(opened(path)) == [{"prompt": f"x{separator}y, z", "completion": "b"}]


def test_an_object_per_file_is_a_row_per_file(tmp_path: Path) -> None:
    made = folder(tmp_path, a_json=json.dumps(ROW, indent=1), b_json=json.dumps({**ROW, "extra": 1}, indent=1))
    assert read(opened(made / "*.json")) == [ROW, {**ROW, "extra": 1}]
    assert read(opened(made / "a.json")) == [ROW]


def test_types_and_keys_may_differ_between_files_and_late_rows(tmp_path: Path) -> None:
    made = folder(tmp_path, a_jsonl=lines({**ROW, "completion": 3.5}), b_jsonl=lines(ROW, {**ROW, "extra": "x"}))
    rows = opened(made / "*.jsonl")
    assert [row["completion"] for row in read(rows)] == [3.5, "b", "b"]
    assert rows.columns == ["prompt", "completion", "extra"]
    assert prepared(made / "*.jsonl").report.sources[0].dropped == {"completion is not text": 1}


def test_broken_lines_are_refused_or_left_out_counted_and_listed(tmp_path: Path) -> None:
    path = folder(tmp_path, a_jsonl=lines(ROW) + "{torn\n[1]\n" + lines(ROW)) / "a.jsonl"
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON") as caught:
        prepared(path)
    assert "data.broken=skip" in caught.value.render()
    (count,) = prepared(path, broken="skip").report.sources
    assert (count.read, count.kept, count.dropped) == (4, 2, {"not a JSON object": 2})
    assert count.dropped_at == {"not a JSON object": [f"{path}:2", f"{path}:3"]}


GOOD = json.dumps(ROW)


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a_json", "5", "a.json:1: expected an object, found a number"),
        ("a_json", "null", "a.json:1: expected an object, found null"),
        ("a_json", '[["prompt", "completion"], ["a", "b"]]', "a.json: element 1 of its list: .*, found a list"),
        ("a_json", f"[{GOOD}, [1]]", "a.json: element 2 of its list: .*, found a list"),
        ("a_json", f"[null, {GOOD}]", "a.json: element 1 of its list: .*, found null"),
        ("a_jsonl", f"null\n{GOOD}\n", "a.jsonl:1: expected an object, found null"),
        ("a_jsonl", f"{GOOD}\nnull\n", "a.jsonl:2: expected an object, found null"),
    ],
)
def test_rows_that_are_no_objects_are_refused_or_left_out(name: str, text: str, place: str, tmp_path: Path) -> None:
    """At a null that comes first, Arrow ends the whole process; a list of lists it takes for a column of text."""
    path = folder(tmp_path, **{name: text}) / name.replace("_", ".")
    with pytest.raises(DataError, match=place) as caught:
        prepared(path)
    assert "--set data.broken=skip" in caught.value.render()
    if GOOD in text:
        (count,) = prepared(path, broken="skip").report.sources
        assert (count.kept, count.dropped) == (1, {"not a JSON object": 1})


def test_records_with_too_many_fields_are_refused_or_left_out(tmp_path: Path) -> None:
    path = folder(tmp_path, a_csv='prompt,completion\na,"b\nb"\nc,d,e\nf,g\n') / "a.csv"
    with pytest.raises(DataError, match=r"a\.csv:4: 3 fields, but the file has 2 columns") as caught:
        prepared(path)
    assert "data.broken=skip" in caught.value.render()
    (count,) = prepared(path, broken="skip").report.sources
    assert (count.read, count.kept) == (3, 2)
    assert count.dropped_at == {"more fields than the file has columns": [f"{path}:4"]}


def test_nothing_but_broken_lines_is_a_data_error(tmp_path: Path) -> None:
    path = folder(tmp_path, a_jsonl="torn\n{\n") / "a.jsonl"
    with pytest.raises(DataError, match="no rows are left"):
        prepared(path, broken="skip")


def test_a_nested_column_is_named_with_dots(tmp_path: Path) -> None:
    row = {"ask": {"text": "q"}, "answers": {"text": ["first", "second"]}}
    path = folder(tmp_path, a_jsonl=lines(row)) / "a.jsonl"
    source: dict[str, Any] = {"name": "s", "path": str(path), "template": "none"}
    source |= {"columns": {"prompt": "ask.text", "completion": "answers.text.1"}}
    (found,) = prepare_data(run_spec({"sources": [source]}), tokenizer()).train
    assert tokenizer().decode(found.input_ids) == "qsecond<eos>"


def test_preference_rows_are_recognised_and_what_is_learned_of_them_is_said(tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    path = folder(tmp_path, a_jsonl=lines(pair)) / "a.jsonl"
    with pytest.raises(DataError, match=r'preferences, but method\.objective = "sft" trains on answers') as caught:
        prepared(path)
    assert 'completion = "chosen"' in caught.value.render()
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    for row in ({**pair, "messages": messages}, {**ROW, "label": False}):
        path.write_text(lines(row))
        assert any("preference" in notice for notice in prepared(path).report.notices)


def test_columns_that_are_not_read_are_said(tmp_path: Path) -> None:
    """Messages of a tree, one to a row, look like texts."""
    path = folder(tmp_path, a_jsonl=lines({"message_id": "1", "text": "Rain?", "role": "prompter"})) / "a.jsonl"
    assert "source s: unused columns: message_id, role" in prepared(path).report.notices


def test_rows_of_dolly_have_their_context_as_input(tmp_path: Path) -> None:
    row = {"instruction": "Who?", "context": "Bob came.", "response": "Bob."}
    for given in (row, {name: row[name] for name in ("instruction", "response")}):
        (found,) = prepared(folder(tmp_path, a_jsonl=lines(given)) / "a.jsonl").train
        text = str(tokenizer().decode(found.input_ids))
        assert "Who?" in text and ("Bob came." in text) == ("context" in given) and text.endswith("Bob.<end>")


def test_preferences_as_openai_has_them_are_pairs(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "Cold?"}], "tools": [], "parallel_tool_calls": True}
    sides = {"preferred_output": "Yes.", "non_preferred_output": "No."}
    row = {"input": asked, **{name: [{"role": "assistant", "content": text}] for name, text in sides.items()}}
    path = folder(tmp_path, a_jsonl=lines(row)) / "a.jsonl"
    spec = run_spec(
        {"sources": [{"name": "s", "path": str(path)}]},
        model={"chat_template": "plain"}, method={"objective": "dpo"},
    )  # fmt: skip
    chosen, rejected = prepare_data(spec, load_tokenizer(spec.recipe.model)).train
    assert "Cold?" in tokenizer().decode(chosen.input_ids)
    for found, answer in ((chosen, "Yes."), (rejected, "No.")):
        assert str(tokenizer().decode(found.input_ids[found.labels != IGNORED])).startswith(answer)
    with pytest.raises(DataError, match="preferences, but"):
        prepared(path)


def test_a_pointer_of_git_lfs_is_no_data(tmp_path: Path) -> None:
    """As text it would be learned."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"
    path = folder(tmp_path, a_txt="Rain.", b_txt=pointer)
    with pytest.raises(DataError, match=r"b\.txt is a Git LFS pointer"):
        prepared(path)


@pytest.mark.parametrize(
    ("text", "encoding"), [("5 €; ‘née’", "windows-1252"), ("n\x81e", "latin1"), ("née", "utf-16")]
)
def test_the_encoding_of_a_file_is_guessed(text: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(f"prompt,completion\na,{text}\n".encode(encoding))
    with pytest.raises(DataError, match="not UTF-8") as caught:
        prepared(path)
    assert f"iconv -f {encoding} " in caught.value.render()


def test_what_would_help_is_said_of_rows_that_fit_nothing(tmp_path: Path) -> None:
    turns = {"conversations": [{"from": "human", "text": "Rain?"}, {"from": "gpt", "text": "Yes."}]}
    for row, words in (
        (turns, "a turn has no content; it has from, text"),
        ({"id": 1, "fields": {"q": "a"}}, 'write nested fields with dots, such as "fields.answer"'),
    ):
        path = folder(tmp_path, a_jsonl=lines(row)) / "a.jsonl"
        spec = run_spec({"sources": [{"name": "s", "path": str(path)}]}, model={"chat_template": "plain"})
        with pytest.raises(DataError) as caught:
            prepare_data(spec, load_tokenizer(spec.recipe.model))
        assert words in caught.value.render()
    path = folder(tmp_path, a_tsv="Rain?\tYes.\nSnow?\tNo.\n") / "a.tsv"
    with pytest.raises(DataError) as caught:
        prepared(path)
    assert "add a line with the column names before it" in caught.value.render()
