"""Answers for a judge, and the win rate by its verdicts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from engine.errors import DataError
from engine.evaluate.verdicts import read_verdicts
from tests.cli.conftest import Tunedeck
from tests.train.preference_rows import write_pairs

RECIPE = """
model = { id = "builtin:tiny", tokenizer = "builtin:bytes", init = "random" }
method = { kind = "full", objective = "dpo" }
train = { max_steps = 1, batch_size = 2, learning_rate = 1e-3 }
generate = { max_new_tokens = 4 }

[data]
max_length = 96
sources = [{ name = "pairs", path = "pairs.jsonl" }]
validation = [{ name = "held", path = "held.jsonl" }]
"""


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_judge_decides_between_answers_and_those_of_the_data(tunedeck: Tunedeck, tmp_path: Path) -> None:
    for name, count in (("pairs", 4), ("held", 4)):
        write_pairs(tmp_path / f"{name}.jsonl", count=count, seed=count)
    (tmp_path / "mine.toml").write_text(RECIPE)
    assert tunedeck("train", "-p", "demo", "-r", "mine.toml", "--name", "judged").code == 0
    early = tunedeck(
        "eval", "judged", "--verdicts", write_rows(tmp_path / "early.jsonl", [{"id": "x-ab", "winner": "a"}])
    )
    assert early.code == DataError.exit_code and "--answers FILE" in early.err

    written = tunedeck("eval", "judged", "--answers", "answers.jsonl")
    assert written.code == 0 and "4 pairs of answers, each in both orders" in written.out
    rows = read_rows(tmp_path / "answers.jsonl")
    assert [row["id"][-3:] for row in rows] == ["-ab", "-ba"] * 4
    assert [(one["a"], one["b"]) == (two["b"], two["a"]) for one, two in zip(rows[0::2], rows[1::2], strict=True)]
    chosen = [row["chosen"] for row in read_rows(tmp_path / "held.jsonl")]
    assert [row["b"] for row in rows[0::2]] == [text.strip() for text in chosen]

    # The run's answer wins twice, ties twice, wins in one order alone, and loses twice.
    winners = ["a", "B ", "tie", "tie", "a", "a", "b", "a"]
    judged = [{**row, "winner": winner} for row, winner in zip(rows, winners, strict=True)]
    (found,) = json.loads(
        tunedeck("eval", "judged", "--verdicts", write_rows(tmp_path / "v.jsonl", judged), "--json").out
    )
    assert found["step"] == 1 and found["count"] == 4
    assert found["metrics"] == {"judge_win_rate": 0.5, "judge_ties": 0.5, "judge_consistency": 0.75}
    assert "1 of them inconsistently" in found["notes"][0] and "95 % interval" in found["notes"][0]
    (run,) = (tmp_path / "runs").iterdir()
    assert [row["metrics"] for row in read_rows(run / "evaluations.jsonl")] == [found["metrics"]]

    one_order = tunedeck("eval", "judged", "--verdicts", write_rows(tmp_path / "one.jsonl", judged[0::2]), "--json")
    (found,) = json.loads(one_order.out)
    assert (
        found["metrics"] == {"judge_win_rate": 0.625, "judge_ties": 0.25}
        and "4 were judged in one order" in found["notes"][1]
    )

    few = tunedeck("eval", "judged", "--verdicts", write_rows(tmp_path / "few.jsonl", judged[:2]))
    assert few.code == DataError.exit_code and "3 of 4 pairs have no verdict" in few.err and "--limit 1" in few.err
    again = shlex.split(few.err.partition("fewer answers: tunedeck ")[2])
    assert tunedeck(*(word.replace("FILE", "fewer.jsonl") for word in again)).code == 0
    fewer = write_rows(tmp_path / "fv.jsonl", [{**row, "winner": "a"} for row in read_rows(tmp_path / "fewer.jsonl")])
    assert tunedeck("eval", "judged", "--verdicts", fewer).code == 0
    strange = write_rows(tmp_path / "strange.jsonl", [*judged, {"id": "0" * 12 + "-ab", "winner": "a"}])
    extra = tunedeck("eval", "judged", "--verdicts", strange)
    assert extra.code == DataError.exit_code and "1 of 9 verdicts do not match a pair" in extra.err
    assert tunedeck("eval", "judged", "--verdicts", strange, "--base").code == 2

    assert tunedeck("eval", "judged", "--answers", "base.jsonl", "--base", "--limit", "2").code == 0
    against_base = read_rows(tmp_path / "base.jsonl")
    assert len(against_base) == 4 and not {row["id"] for row in against_base} & {row["id"] for row in rows}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no verdicts"),
        ("[1]", "not a JSON object with an id"),
        ('{"id": "a-ab"}', "winner is missing"),
        ('{"id": "a-ab", "winner": 1}', "winner is 1"),
        ('{"id": "a-ab", "winner": "a"}\n{"id": "a-ab", "winner": "b"}', "v.jsonl:2: a second verdict on a-ab"),
    ],
    ids=["empty", "list", "no winner", "number", "twice"],
)
def test_what_is_no_verdict_is_named_by_its_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "v.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=said):
        read_verdicts(file)
