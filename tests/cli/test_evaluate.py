"""`tunedeck eval`: a run's result gets the same scores whether it is given as a run or as a model folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.cli.conftest import Tunedeck

SHORT = ("train.max_steps=4", "train.warmup_steps=0", "eval.limit=16", "evaluate.limit=32", "evaluate.log_samples=2")


def test_a_result_scores_the_same_as_a_run_and_as_a_model(tunedeck: Tunedeck, tmp_path: Path) -> None:
    sets = [part for text in SHORT for part in ("--set", text)]
    assert tunedeck("train", "-p", "demo", "-r", "demo", *sets).code == 0
    (name,) = os.listdir(tmp_path / "runs")
    base, of_run = json.loads(tunedeck("eval", "last", "--base", "--json").out)
    model = str(tmp_path / "runs" / name / "model")
    (of_model,) = json.loads(tunedeck("eval", model, "-p", "demo", "-r", "demo", *sets, "--json").out)
    assert of_run["metrics"] == of_model["metrics"] and of_run["samples"] == of_model["samples"]
    assert of_run["count"] == of_model["count"] == 32
    assert (base["step"], of_run["step"], of_model["step"]) == (0, 4, None)
    assert base["metrics"]["loss"] > of_run["metrics"]["loss"]
    assert len((tmp_path / "runs" / name / "evaluations.jsonl").read_text().splitlines()) == 2
    refused = tunedeck("eval", "last", "-p", "demo", "-r", "demo")
    refused.complains(2, "last is a run, which is scored with its own settings", "fix: tunedeck eval last")
    assert json.loads(tunedeck("eval", "last", "--json").out)[0]["metrics"] == of_run["metrics"]


def test_a_file_is_no_model_to_score(tunedeck: Tunedeck, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}')
    refused = tunedeck("eval", str(rows), "-p", "demo", "-r", "demo")
    refused.complains(2, f"model.id = '{rows}' is a file", f"--set data.sources.0.path={rows}")
