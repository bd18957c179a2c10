"""`tunedeck eval`: a run's result gets the same scores whether it is given as a run or as a model folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.cli.conftest import Tunedeck
from tests.model.test_families import WORKS, own_code

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
    refused.complains(2, "last is a run and uses its own settings", "fix: tunedeck eval last")
    assert json.loads(tunedeck("eval", "last", "--json").out)[0]["metrics"] == of_run["metrics"]


def test_an_adapter_in_its_folder_scores_as_its_run(tunedeck: Tunedeck, tmp_path: Path) -> None:
    """With a recipe of full fine-tuning, and beside its base, which has no tokenizer of its own."""
    sets = [part for text in (*SHORT, "method.kind=lora") for part in ("--set", text)]
    assert tunedeck("train", "-p", "demo", "-r", "demo", *sets).code == 0
    (name,) = os.listdir(tmp_path / "runs")
    of_run = json.loads(tunedeck("eval", "last", "--base", "--json").out)
    adapter = str(tmp_path / "runs" / name / "adapter")
    limit = ("--set", "evaluate.limit=32")
    of_folder = json.loads(tunedeck("eval", adapter, "-p", "demo", "-r", "demo", *limit, "--base", "--json").out)
    assert [each["metrics"] for each in of_folder] == [each["metrics"] for each in of_run]
    answered = tunedeck("chat", adapter, "--base", "--plain", "--prompt", "7 april 2005 -> ")
    assert answered.code == 0 and f"{adapter}'s base: " in answered.out
    refused = tunedeck("chat", f"{adapter}/base", "--plain", "--prompt", "hi")
    refused.complains(2, "no tokenizer in", "model.tokenizer")


def test_code_that_comes_with_a_model_runs_when_the_score_allows_it(tunedeck: Tunedeck, tmp_path: Path) -> None:
    own_code(tmp_path / "own", WORKS)
    words = ("eval", str(tmp_path / "own"), "-p", "demo", "-r", "demo", "--limit", "2")
    tunedeck(*words).complains(2, "does not run by default", "add --trust-remote-code")
    scored = tunedeck(*words, "--trust-remote-code")
    assert scored.code == 0 and "perplexity" in scored.out, scored.err


def test_a_file_is_no_model_to_score(tunedeck: Tunedeck, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}')
    refused = tunedeck("eval", str(rows), "-p", "demo", "-r", "demo")
    refused.complains(2, f"model.id = '{rows}' is a file", f"--set data.sources.0.path={rows}")
