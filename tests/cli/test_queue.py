"""`tunedeck queue`: runs are started one after another, each with its own engine process; a failed run does not stop
the next ones."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_recipe

SHORT = ("--set", "train.max_steps=2", "--set", "train.warmup_steps=0", "--set", "eval.every_steps=")


def test_the_queue_runs_to_its_end_past_a_run_that_fails(tunedeck: Tunedeck, tmp_path: Path) -> None:
    tunedeck("queue", "add", "-p", "demo", "-r", "demo", "--name", "good", *SHORT)
    tunedeck("queue", "add", "-p", "demo", "-r", write_recipe(tmp_path, data=None), "--name", "bad", "--first")
    listed = json.loads(tunedeck("queue", "list", "--json").out)
    assert listed["worker"] is None
    assert [(row["position"], row["run"].partition("-")[2], row["status"]) for row in listed["runs"]] == [
        (1, "bad", "queued"), (2, "good", "queued"),
    ]  # fmt: skip
    outcome = tunedeck("queue", "start")
    assert outcome.code == 5
    assert "bad: failed at step 0" in outcome.out and "good: done at step 2" in outcome.out
    assert json.loads(tunedeck("queue", "list", "--json").out) == {"worker": None, "runs": []}


def test_a_removed_run_goes_to_the_trash(tunedeck: Tunedeck, tmp_path: Path) -> None:
    run = json.loads(tunedeck("queue", "add", "-p", "demo", "-r", "demo", "--json").out)
    assert run["position"] == 1
    assert ".trash" in tunedeck("queue", "remove", "last").out
    assert not Path(run["path"]).exists() and json.loads(tunedeck("runs", "--json").out) == []
    assert "empty" in tunedeck("queue", "start").err


def test_what_does_not_fit_is_refused_before_it_waits(tunedeck: Tunedeck, tmp_path: Path) -> None:
    outcome = tunedeck("queue", "add", "-p", "24gb", "-r", "full", "--set", "model.id=Qwen/Qwen2.5-72B")
    outcome.complains(3, "does not fit")
    assert json.loads(tunedeck("queue", "list", "--json").out)["runs"] == []


def test_a_run_that_cannot_be_started_is_said_and_so_is_why_it_cannot_be_resumed(tunedeck: Tunedeck) -> None:
    run = json.loads(tunedeck("queue", "add", "-p", "demo", "-r", "demo", "--name", "stuck", *SHORT, "--json").out)
    log = Path(run["path"]) / "engine.log"
    log.mkdir()
    outcome = tunedeck("queue", "start")
    assert outcome.code == 6
    assert "stuck: failed at step 0" in outcome.out and f"{log} cannot be written: Is a directory" in outcome.out
    tunedeck("resume", run["path"]).complains(6, f"{log} cannot be written: Is a directory", "fix: move")
