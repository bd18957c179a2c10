"""What `tunedeck data` says of the data as a whole: lost tokens, padding, packing, ends, duplicates; and which samples
it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.commands.data import figures_of
from engine.data.prepare import prepare_data
from engine.data.report import Quality
from engine.errors import UsageError
from tests.data.specs import run_spec, tokenizer

Write = Callable[..., str]


def measured(paths: list[str], template: str | None = None, **data: Any) -> Quality:
    sources = [{"name": f"s{number}", "path": path} for number, path in enumerate(paths)]
    spec = run_spec({"sources": sources, **data}, train={"batch_size": 2})
    made = tokenizer(template)
    return figures_of(prepare_data(spec, made), made, spec.recipe)


def test_tokens_beyond_max_length_are_counted_whether_dropped_or_cut(jsonl: Write) -> None:
    path = jsonl([{"text": "a" * 9}, {"text": "b" * 29}])
    assert measured([path], max_length=20, over_length="drop").lost_tokens == 30
    assert measured([path], max_length=20, over_length="truncate").lost_tokens == 10
    assert measured([path], max_length=20).lost_tokens == 0


def test_padding_is_that_of_steps_padded_to_their_longest_sequence(jsonl: Write) -> None:
    found = measured([jsonl([{"text": "a" * 9}, {"text": "b" * 29}])])
    assert found.padding == pytest.approx(1 - 40 / 60)


def test_what_packing_gives_is_what_it_gives(jsonl: Write) -> None:
    path = jsonl([{"text": "x" * (3 + number % 7)} for number in range(40)])
    loose = measured([path], max_length=32)
    packed = measured([path], max_length=32, packing=True)
    assert packed.packed_rows is None
    assert loose.packed_fill == pytest.approx(packed.packed_fill)
    spec = run_spec({"sources": [{"name": "a", "path": path}], "max_length": 32, "packing": True})
    assert loose.packed_rows == len(prepare_data(spec, tokenizer()).train)


def test_duplicates_are_counted_in_the_source_where_they_come_again(jsonl: Write) -> None:
    first, second = jsonl([{"text": "a"}, {"text": "b"}, {"text": "a"}], "1.jsonl"), jsonl([{"text": "b"}], "2.jsonl")
    found = measured([first, second])
    assert [(source.samples, source.duplicates) for source in found.sources] == [(3, 1), (1, 1)]


def test_a_source_whose_answers_never_end_is_warned_of(jsonl: Write) -> None:
    marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    marked += "<end>{% else %}{{ '<user>' + m.content }}{% endif %}{% endfor %}"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = jsonl([{"messages": turns}])
    endless = measured([path], marked)
    assert endless.sources[0].ended == 0.0 and endless.lines()[0].startswith("WARNING: no answer in s0 ends")
    assert measured([path]).sources[0].ended == 1.0


def test_the_last_piece_of_a_split_text_ends_it(jsonl: Write) -> None:
    assert measured([jsonl([{"text": "a" * 50}])], max_length=20).sources[0].ended == 1.0


@pytest.fixture
def recipe(jsonl: Write, tmp_path: Path) -> str:
    path = jsonl([{"text": f"text {number}"} for number in range(20)])
    (tmp_path / "r.toml").write_text(
        'schema = 1\nkind = "recipe"\n[model]\nid = "builtin:tiny"\n[data]\n[[data.sources]]\nname = "s"\n'
        f'path = "{path}"\n'
    )
    return str(tmp_path / "r.toml")


def shown(recipe: str, *arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["data", "-r", recipe, "--json", *arguments])
    assert done.exit_code == 0, done.output
    samples = json.loads(done.stdout)["samples"]
    return ["".join(piece["text"] for piece in sample["pieces"]) for sample in samples]


def test_row_and_find_choose_the_samples(recipe: str) -> None:
    assert shown(recipe, "--row", "19") == ["text 18<eos>", "text 19<eos>"]
    assert shown(recipe, "--find", "text 1", "--show", "3") == ["text 1<eos>", "text 10<eos>", "text 11<eos>"]
    assert shown(recipe, "--find", "text 1", "--row", "12", "--show", "1") == ["text 11<eos>"]


@pytest.mark.parametrize(("arguments", "words"), [
    (["--row", "21"], "the training data has 20 samples"),
    (["--find", "nowhere"], "no sample contains this text"),
])  # fmt: skip
def test_a_sample_that_is_not_there_is_said(arguments: list[str], words: str, recipe: str) -> None:
    done = CliRunner().invoke(app, ["data", "-r", recipe, *arguments])
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)


def test_the_report_has_the_figures_and_special_tokens(recipe: str) -> None:
    done = CliRunner().invoke(app, ["data", "-r", recipe])
    assert "with data.packing: 1 sequences" in done.stdout
    assert "s: 20 samples, 0 duplicates, 100.0 % end with an end token" in done.stdout
