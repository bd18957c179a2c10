"""`tunedeck compare --csv` and `--markdown`: all of the table, in a form that other programs read."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

from engine.commands.compare_formats import comparison_csv, comparison_markdown
from tests.cli.conftest import Tunedeck
from tests.cli.test_fixes import scored_runs
from tests.journal.test_compare_rows import FOUND


def test_csv_has_exact_values_under_the_names_of_json() -> None:
    rows = list(csv.reader(io.StringIO(comparison_csv(FOUND, "exact_match", None))))
    assert rows[:4] == [
        ["section", "name", "a", "b"],
        ["run", "status", "done", "done"],
        ["settings", "train.learning_rate", "1e-05", "0.001"],
        ["settings", "train.seed", "123456", ""],
    ]
    scored = "scored on dates (500 samples)"
    assert [scored, "exact_match", "0.996", ""] in rows and [scored, "exact_match at step 0", "0.0", ""] in rows
    assert ["evaluation while training", "best_loss", "0.25", "0.5"] in rows
    assert ["training", "peak_bytes", "6291456", "21474836480"] in rows


def test_a_text_of_a_run_is_neither_a_formula_nor_a_second_line_nor_markup() -> None:
    hostile = replace(FOUND, settings={"recipe.title": ['=HYPERLINK("x")', "a|b\n<img>"]})
    (row,) = [each for each in csv.reader(io.StringIO(comparison_csv(hostile, None, None))) if "recipe.title" in each]
    assert row[2:] == ['\'=HYPERLINK("x")', "a|b <img>"]
    (line,) = [each for each in comparison_markdown(hostile, None, None).splitlines() if "recipe.title" in each]
    assert line == '| recipe.title | =HYPERLINK("x") | a\\|b \\<img\\> |'


def test_markdown_is_a_table_with_the_best_in_bold() -> None:
    lines = comparison_markdown(FOUND, None, None).splitlines()
    assert lines[:4] == [
        "|  | a | b |",
        "| --- | ---: | ---: |",
        "| status | done | done |",
        "| **settings that differ** |  |  |",
    ]
    assert "| best evaluation loss | **0.25** | 0.5 |" in lines
    assert {line.count("|") - line.count("\\|") for line in lines} == {4}


def test_the_command_prints_both_with_gains_and_one_format_at_a_time(tunedeck: Tunedeck, tmp_path: Path) -> None:
    scored_runs(tmp_path)
    compared = ("compare", "one", "two", "--metric", "loss", "--against", "one")
    printed = tunedeck(*compared, "--csv").out
    names = next(csv.reader(io.StringIO(printed)))[2:]
    assert [f"gain over {names[0]}", "gain", "", "1.0"] in list(csv.reader(io.StringIO(printed)))
    assert "| gain | - | +1 |" in tunedeck(*compared, "--markdown").out
    tunedeck(*compared, "--csv", "--json").complains(2, "exclude each other", "choose one of them")
    assert tunedeck(*compared, "--csv", "--fail-if", "loss < -40%").code == 8
