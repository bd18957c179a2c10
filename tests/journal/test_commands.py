"""The commands that show runs or send requests to engines, tested with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.cli import app
from engine.errors import TunedeckError, UsageError
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.summary import summarise
from tests.journal.conftest import Spawn
from tests.journal.event_fields import backoff_fields, step_fields
from tests.journal.run_directories import new_run
from tests.journal.waiting import PATIENCE_SECONDS, until


def tunedeck(*arguments: str, folder: Path) -> Result:
    return CliRunner().invoke(app, [*arguments, "--runs", str(folder)])


@pytest.fixture
def folder(run: RunDirectory) -> Path:
    return run.path.parent


def finish(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        writer.write("stage_started", max_steps=2)
        writer.write("step", **step_fields(1))
        writer.write("backoff", **backoff_fields(2))
        writer.write("step", **step_fields(2))
        writer.write("run_finished", status="done", exit_code=0, result="adapter", samples_lost=0)


def test_show_json_has_the_promised_keys(run: RunDirectory, folder: Path) -> None:
    finish(run)
    shown = json.loads(tunedeck("show", "last", "--json", folder=folder).stdout)
    promised = "run status step max_steps metrics backoffs samples_lost predicted measured result"
    assert list(shown)[:10] == promised.split()
    assert (shown["status"], shown["step"], shown["backoffs"], shown["samples_lost"]) == ("done", 2, 1, 0)


def test_show_is_readable_and_says_that_the_device_is_simulated(run: RunDirectory, folder: Path) -> None:
    finish(run)
    text = tunedeck("show", "demo", folder=folder).stdout
    assert "done (simulated device)" in text and "peak memory" in text and str(run.path) in text
    assert "\x1b" not in text


def test_show_oom_tells_each_backoff(run: RunDirectory, folder: Path) -> None:
    finish(run)
    assert "step 2: out of memory in backward" in tunedeck("show", "last", "--oom", folder=folder).stdout


def test_markup_and_escapes_in_a_run_are_shown_as_text(run: RunDirectory, folder: Path) -> None:
    text = run.run_toml.read_text().replace("builtin:tiny", "[red]x[/nope]\\u001b[2J\\u202e")
    run.run_toml.write_text(text)
    for command in (["show", "last"], ["runs"]):
        result = tunedeck(*command, folder=folder)
        assert result.exit_code == 0
        assert "[red]x[/nope]" in result.stdout and "\x1b" not in result.stdout and "\u202e" not in result.stdout


def test_runs_lists_the_newest_first(run: RunDirectory, folder: Path) -> None:
    second = new_run(folder, "second")
    listed = json.loads(tunedeck("runs", "--json", folder=folder).stdout)
    assert [entry["run"] for entry in listed] == [second.name, run.name]
    assert json.loads(tunedeck("runs", "--json", folder=folder / "none").stdout) == []


def test_stop_is_taken_and_answered(run: RunDirectory, folder: Path, spawn: Spawn) -> None:
    child = spawn(run, "obey")
    until(lambda: summarise(run).step > 0)
    assert tunedeck("stop", "last", folder=folder).exit_code == 0
    assert child.wait(timeout=PATIENCE_SECONDS) == 130
    assert tunedeck("wait", "last", folder=folder).exit_code == 130
    assert summarise(run).status == "stopped"


def test_stop_twice_is_by_force(run: RunDirectory, folder: Path, spawn: Spawn) -> None:
    child = spawn(run, "ignore")
    until(lambda: summarise(run).step > 0)
    tunedeck("stop", "last", folder=folder)
    tunedeck("stop", "last", folder=folder)
    assert child.wait(timeout=PATIENCE_SECONDS) == -9
    assert tunedeck("wait", "last", folder=folder).exit_code == 137


def test_a_stop_after_a_pause_is_not_by_force(run: RunDirectory, folder: Path, spawn: Spawn) -> None:
    child = spawn(run, "ignore")
    until(lambda: summarise(run).step > 0)
    tunedeck("pause", "last", folder=folder)
    tunedeck("stop", "last", folder=folder)
    assert child.poll() is None and summarise(run).stopping


def test_pause_leaves_the_run_paused(run: RunDirectory, folder: Path, spawn: Spawn) -> None:
    child = spawn(run, "obey")
    until(lambda: summarise(run).step > 0)
    tunedeck("checkpoint", "last", folder=folder)
    tunedeck("pause", "last", folder=folder)
    assert child.wait(timeout=PATIENCE_SECONDS) == 130
    assert summarise(run).status == "paused"


@pytest.mark.parametrize("command", ["stop", "pause", "checkpoint"])
def test_a_run_without_an_engine_cannot_be_asked(run: RunDirectory, folder: Path, command: str) -> None:
    finish(run)
    error = tunedeck(command, "last", folder=folder).exception
    assert isinstance(error, UsageError) and "is done" in error.found
    assert list(run.control.iterdir()) == []


def test_waiting_for_a_run_whose_engine_vanished_is_an_error(
    run: RunDirectory, folder: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn(run, "vanish").wait(timeout=PATIENCE_SECONDS)
    monkeypatch.setattr("engine.journal.summary.STALE_SECONDS", 0.0)
    error = tunedeck("wait", "last", folder=folder).exception
    assert isinstance(error, TunedeckError) and error.exit_code == 1


def test_log_keeps_indentation_and_drops_control_codes(run: RunDirectory, folder: Path) -> None:
    run.log.write_bytes(b"Traceback:\n    at \x1b[31mline\xff\n")
    assert tunedeck("log", "last", folder=folder).stdout == "Traceback:\n    at  [31mline\ufffd\n"


def test_log_follows_to_the_end_of_the_run(run: RunDirectory, folder: Path, spawn: Spawn) -> None:
    spawn(run, "finish")
    run.log.write_bytes(b"hello\n")
    assert tunedeck("log", "last", "-f", folder=folder).stdout.startswith("hello")


def test_watch_ends_with_the_run_and_its_table(run: RunDirectory, folder: Path, spawn: Spawn) -> None:
    spawn(run, "finish")
    until(run.events.exists)
    text = tunedeck("watch", "last", folder=folder).stdout
    assert "status" in text and "5 of 5" in text
