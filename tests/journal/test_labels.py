"""Tags, notes and other names of runs, by command."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from engine.cli import app
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.index import list_runs, resolve_run
from engine.journal.summary import SummaryReader
from tests.journal.event_fields import step_fields
from tests.tui.recorded_runs import make_run
from tests.tui.recorded_stages import make_staged_run


def command(runs: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--runs", str(runs)])


def test_tags_and_a_note_are_stored_with_the_run_and_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert command(tmp_path, "tag", "last", "keep", "baseline", "--note", "rank 8 was too low").exit_code == 0
    assert command(tmp_path, "tag", "last", "--remove", "keep").stdout.split() == [
        "tags", "baseline", "note", "rank", "8", "was", "too", "low",
    ]  # fmt: skip
    shown = command(tmp_path, "show", "last")
    assert "baseline" in shown.stdout and "rank 8 was too low" in shown.stdout
    document = json.loads(command(tmp_path, "show", "last", "--json").stdout)
    assert (document["tags"], document["note"]) == (["baseline"], "rank 8 was too low")
    refused = command(tmp_path, "tag", run.name, "two words")
    assert "is not a tag" in str(getattr(refused.exception, "found", ""))
    assert "has no tag" in str(getattr(command(tmp_path, "tag", "last", "--remove", "no").exception, "found", ""))


def test_damaged_labels_are_none(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for text in ("{", "[]", '{"tags": 3, "note": []}', '{"tags": [1, "a"]}'):
        (run.path / "labels.json").write_text(text)
        assert command(tmp_path, "tag", "last").exit_code == 0


def test_a_renamed_run_keeps_its_time_and_is_found_by_its_new_name(tmp_path: Path) -> None:
    run = make_staged_run(tmp_path)
    stamp = run.name.partition("-")[0]
    assert command(tmp_path, "rename", "last", "better").stdout == f"{run.name} is now {stamp}-better\n"
    renamed = resolve_run("better", tmp_path)
    assert renamed.name == f"{stamp}-better" and SummaryReader(renamed).refresh().name == "better"
    assert not run.path.exists() and len(list_runs(tmp_path)) == 1
    assert "not a valid name" in str(getattr(command(tmp_path, "rename", "better", "a b").exception, "found", ""))
    RunDirectory(tmp_path / f"{stamp}-taken").path.mkdir()
    assert "already exists" in str(getattr(command(tmp_path, "rename", "better", "taken").exception, "found", ""))


def test_a_run_that_others_start_from_is_not_renamed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "base")
    make_run(tmp_path, "next", model=f"run:{run.path}")
    refused = command(tmp_path, "rename", "base", "other").exception
    assert "is used by" in str(getattr(refused, "found", "")) and run.path.is_dir()


def test_show_prints_answers_and_the_time_of_all_starts(tmp_path: Path) -> None:
    run = make_run(tmp_path, status="paused")
    answers = [{"prompt": "5 of may", "answer": "05-05", "reference": "05-05"}]
    with EventWriter(run) as writer:
        writer.write("eval", step=30, metrics={"loss": 0.2}, samples=answers)
        writer.write("run_finished", status="paused", exit_code=130, result=None, seconds=100.0)
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        writer.write("run_finished", status="done", exit_code=0, result="model", seconds=20.0)
    shown = command(tmp_path, "show", "last").stdout
    assert "'5 of may' -> '05-05' (reference '05-05')" in shown
    assert "0:20, 2:00 over all starts" in shown


def test_the_curve_of_a_run_is_a_few_of_its_losses(tmp_path: Path) -> None:
    run = make_run(tmp_path, status="queued")
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        for step in range(1, 1001):
            writer.write("step", **step_fields(step, loss=float(step)))
    losses = SummaryReader(run).refresh().losses
    assert 30 <= len(losses) <= 64 and losses == sorted(losses) and losses[-1] > 900
    with EventWriter(run) as writer:
        writer.write("resumed", step=500, **{"from": "checkpoints/step-00000500"})
    assert max(SummaryReader(run).refresh().losses) <= 500
