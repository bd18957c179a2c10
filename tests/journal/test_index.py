"""Finding the run that the argument RUN of a command names: by name, by the beginning of a name, by path, or as
`last`."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.config.load import resolve
from engine.errors import UsageError
from engine.journal.directory import RunDirectory
from engine.journal.index import list_runs, record_start, recorded_runs, resolve_run
from engine.journal.stages import typed_name
from engine.launch.create_run import pin_runs
from tests.journal.run_directories import RUN_TOML


def make(folder: Path, directory: str, name: str) -> RunDirectory:
    run = RunDirectory(folder / directory)
    run.path.mkdir(parents=True)
    run.run_toml.write_text(RUN_TOML.format(name=name))
    run.plan_json.write_text("{}")
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    make(runs, "20261120T100000Z-exp", "exp")
    make(runs, "20261120T100001Z-exp-2", "exp-2")
    make(runs, "20261120T100002Z-exp", "exp")
    make(runs, "20261120T100002Z-exp-2", "exp")
    make(runs, "20261121T100000Z-other", "other")
    return runs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20261120T100000Z-exp", "20261120T100000Z-exp"),
        ("20261120T100001", "20261120T100001Z-exp-2"),
        ("exp-2", "20261120T100001Z-exp-2"),
        ("exp", "20261120T100002Z-exp-2"),
        ("last", "20261121T100000Z-other"),
        ("20261121", "20261121T100000Z-other"),
    ],
)
def test_a_run_is_found_by(folder: Path, text: str, expected: str) -> None:
    assert resolve_run(text, folder).name == expected


def test_the_name_that_messages_write_for_a_stage_finds_it(folder: Path) -> None:
    run = resolve_run("last", folder)
    stage = make(run.stages, "02-prefer", "other/prefer")
    assert typed_name(run) == run.name and typed_name(stage) == f"{run.name}/prefer"
    assert resolve_run(typed_name(stage), folder).path == stage.path


def test_a_path_is_a_run_from_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert resolve_run("./20261120T100000Z-exp", None).path == folder / "20261120T100000Z-exp"
    assert resolve_run("20261120T100000Z-exp", None).path == folder / "20261120T100000Z-exp"
    assert resolve_run(str(folder / "20261120T100000Z-exp"), None).exists()


def test_an_ambiguous_prefix_names_the_candidates(folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_run("20261120T100002Z", folder)
    assert caught.value.exit_code == 2
    assert "20261120T100002Z-exp-2" in caught.value.render()


@pytest.mark.parametrize("text", ["nothing", "./nothing", "/", "..", ""])
def test_what_is_no_run_is_a_usage_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        resolve_run(text, tmp_path / "runs")


def test_a_full_directory_name_means_that_run_from_any_directory(folder: Path, tmp_path: Path) -> None:
    run = RunDirectory(folder / "20261120T100000Z-exp")
    assert record_start(run) is None
    assert resolve_run(run.name, tmp_path / "nowhere").path == run.path
    shutil.rmtree(run.path)
    assert recorded_runs() == []


@pytest.mark.parametrize("text", ["exp", "last", "20261120T1000", "exp/one", "renamed"])
def test_a_short_name_does_not_reach_into_another_folder_and_names_what_is_there(
    folder: Path, tmp_path: Path, text: str
) -> None:
    for run in (RunDirectory(folder / "20261120T100000Z-exp"), make(folder, "renamed", "old")):
        record_start(run)
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(UsageError, match="does not search other folders") as caught:
        resolve_run(text, tmp_path / "nowhere")
    assert str(folder / ("renamed" if text in ("renamed", "last") else "20261120T100000Z-exp")) in caught.value.found


@pytest.mark.parametrize("command", ["merge", "resume", "eval", "show", "stop", "wait"])
def test_no_command_takes_a_short_name_from_another_project(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    run = RunDirectory(folder / "20261120T100000Z-exp")
    record_start(run)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    before = sorted(run.path.iterdir())
    done = CliRunner().invoke(app, [command, "exp"])
    assert isinstance(done.exception, UsageError) and str(run.path) in done.exception.found
    assert sorted(run.path.iterdir()) == before


def test_the_runs_folder_goes_before_earlier_runs(folder: Path, tmp_path: Path) -> None:
    record_start(make(tmp_path / "elsewhere", "20270101T000000Z-exp", "exp"))
    assert resolve_run("exp", folder).name == "20261120T100002Z-exp-2"
    assert resolve_run("last", folder).name == "20261121T100000Z-other"


def test_a_state_folder_that_cannot_be_written_is_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "file" / "state"))
    warning = record_start(RunDirectory(folder / "20261120T100000Z-exp"))
    assert warning is not None and "20261120T100000Z-exp" in warning
    assert recorded_runs() == []


def test_damaged_notes_are_passed_over(folder: Path) -> None:
    record_start(RunDirectory(folder / "20261120T100000Z-exp"))
    with (Path(os.environ["TUNEDECK_STATE"]) / "runs.jsonl").open("a") as file:
        file.write('{"path": "/to\n[]\n')
    assert len(recorded_runs()) == 1


def test_half_made_runs_are_not_listed(folder: Path) -> None:
    (folder / ".new-abc").mkdir()
    (folder / ".new-abc" / "run.toml").write_text("")
    (folder / "20261120T100009Z-empty").mkdir()
    assert list_runs(folder)[0].name == "20261121T100000Z-other"
    assert len(list_runs(folder)) == 5
    assert list_runs(folder / "missing") == []


@pytest.mark.parametrize("reference", ["run:last@../..", "run:last@-1", "run:nothing", "run:", "run:last@" + "9" * 99])
def test_a_reference_that_names_no_checkpoint_is_refused_before_a_run_folder_exists(
    folder: Path, reference: str
) -> None:
    before = sorted(folder.iterdir())
    arguments = ["queue", "add", "-p", "demo", "-r", "demo", "--runs", str(folder), "--set", f"model.id={reference}",
                 "--set", "model.init=pretrained"]  # fmt: skip
    refused = CliRunner().invoke(app, arguments).exception
    assert isinstance(refused, UsageError) and reference.removeprefix("run:").partition("@")[0] in refused.found
    assert sorted(folder.iterdir()) == before


def test_a_run_keeps_the_path_of_the_run_that_it_starts_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_RUNS", str(folder))
    spec = resolve(
        "demo", "demo", ["model.id=run:exp-2@best", "model.tokenizer=run:last", "model.init=pretrained"]
    ).spec
    model = pin_runs(spec).recipe.model
    assert model.id == f"run:{folder}/20261120T100001Z-exp-2@best"
    assert model.tokenizer == f"run:{folder}/20261121T100000Z-other"


def test_runs_of_the_command_line_holds_for_references_and_ends_with_the_command(folder: Path) -> None:
    before = os.environ.get("TUNEDECK_RUNS")
    assert CliRunner().invoke(app, ["runs", "--runs", str(folder)]).exit_code == 0
    assert os.environ.get("TUNEDECK_RUNS") == before


CHANGING = {
    "rm": [], "rename": ["other-name"], "tag": ["good"], "stop": [], "pause": [], "checkpoint": [], "resume": [],
    "merge": [], "eval": [], "sync": [], "handover": ["--vllm"], "push": ["me/x", "--yes"],
}  # fmt: skip
"""Commands that change a run, or send it, with what they need besides its name."""


@pytest.mark.parametrize("command", CHANGING)
def test_a_command_does_not_leave_the_folder_named_with_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    run, named = RunDirectory(folder / "20261120T100000Z-exp"), tmp_path / "named"
    record_start(run)
    monkeypatch.setenv("TUNEDECK_RUNS", str(folder))
    monkeypatch.chdir(folder)
    (named / "elsewhere").parent.mkdir()
    (named / "elsewhere").symlink_to(run.path)
    before = sorted(run.path.iterdir())
    for text in (run.name, str(run.path), f"./{run.name}", "elsewhere", "last", str(named / "elsewhere")):
        done = CliRunner().invoke(app, [command, text, *CHANGING[command], "--runs", str(named)])
        assert isinstance(done.exception, UsageError), (text, done.output)
    (named / run.name).mkdir()
    os.mkfifo(named / run.name / "run.toml")
    for arguments in (["--runs", str(named)], []):
        monkeypatch.setenv("TUNEDECK_RUNS", str(named))
        monkeypatch.chdir(named)
        done = CliRunner().invoke(app, [command, run.name, *CHANGING[command], *arguments])
        assert isinstance(done.exception, UsageError) and "damaged" in done.exception.found, done.output
    assert sorted(run.path.iterdir()) == before and sorted(path.name for path in folder.iterdir())[0] == run.name


def test_last_is_what_came_last_into_the_folder(folder: Path) -> None:
    for number, name in enumerate(("99991231T235959Z-x", "20200101T000000Z-old", "zzz")):
        imported = make(folder, name, "x")
        imported.imported.mkdir()
        came = time.time() - 300 + number
        os.utime(imported.imported, (came, came))
        assert resolve_run("last", folder).name == name
    new = make(folder, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-new", "new")
    assert resolve_run("last", folder).path == new.path


def test_a_copied_run_dated_in_the_future_is_not_last_for_ever(folder: Path) -> None:
    future = make(folder, "99991231T235959Z-x", "x")
    later = time.time() + 10**6
    os.utime(future.plan_json, (later, later))
    new = make(folder, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-new", "new")
    assert resolve_run("last", folder).path == new.path
