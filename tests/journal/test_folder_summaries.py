"""Summaries of a folder's runs are kept for later processes, and hold only as long as no file of the run changes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config.files.trust import state_folder
from engine.journal.control import send_request
from engine.journal.directory import RunDirectory, rewrite_spec
from engine.journal.events import EventWriter
from engine.journal.folder_summaries import FolderSummaries, file_stamp
from engine.journal.liveness import claim
from engine.journal.summary import RunSummary, summarise
from tests.journal.event_fields import step_fields
from tests.journal.run_directories import new_run
from tui.run.listing import RunList


@pytest.fixture
def ended(tmp_path: Path) -> RunDirectory:
    """A run of three steps that is done."""
    run = new_run(tmp_path / "runs")
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        for step in (1, 2, 3):
            writer.write("step", **step_fields(step))
        writer.write("eval", step=3, metrics={"loss": 0.5})
        writer.write("run_finished", status="done", exit_code=0, result="model")
    return run


def keep(run: RunDirectory) -> RunSummary:
    """Make a summary as one command does, and keep it for the next."""
    kept = FolderSummaries(run.path.parent)
    summary = kept.of(run)
    kept.write([run])
    return summary


def kept_file() -> Path:
    (file,) = (state_folder() / "summaries").iterdir()
    return file


def test_another_process_says_the_same_without_reading_the_journal(ended: RunDirectory) -> None:
    first = keep(ended)
    assert first == summarise(ended) and first.best is not None and first.losses == [1.0, 0.5, 1 / 3]
    before = ended.events.stat()
    ended.events.write_bytes(b"x" * before.st_size)  # what nobody does: another text with the same size and time
    os.utime(ended.events, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert FolderSummaries(ended.path.parent).of(ended) == first != summarise(ended)


def test_a_list_of_runs_in_the_console_shares_them(ended: RunDirectory) -> None:
    RunList.of_folder(ended.path.parent).refresh(seconds=10)
    assert FolderSummaries(ended.path.parent).known(ended) == summarise(ended)
    listed = RunList.of_folder(ended.path.parent)
    listed.refresh(seconds=10)
    (entry,) = listed.entries
    assert entry.summary == summarise(ended)
    append(ended)
    listed.refresh(seconds=10)
    assert entry.summary == summarise(ended) and entry.summary.step == 4


def append(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        writer.write("step", **step_fields(4))


def write_control(run: RunDirectory) -> None:
    send_request(run, "stop")


@pytest.mark.parametrize(
    "change",
    [
        append,
        write_control,
        lambda run: rewrite_spec(run, run.run_toml.read_text().replace("builtin:tiny", "builtin:other")),
        lambda run: run.checkpoint(3).mkdir(),
        lambda run: run.engine.write_text("[1]"),
        lambda run: run.run_toml.write_text(run.run_toml.read_text() + "\n"),
        lambda run: run.events.unlink(),
    ],
)
def test_any_change_makes_a_new_summary(ended: RunDirectory, change: Callable[[RunDirectory], None]) -> None:
    keep(ended)
    change(ended)
    kept = FolderSummaries(ended.path.parent)
    assert kept.known(ended) is None
    assert kept.of(ended) == summarise(ended)


def test_of_a_run_that_an_engine_works_on_none_is_kept(tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs")
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
    with claim(run):
        assert keep(run).status == "running"
        assert FolderSummaries(run.path.parent).known(run) is None


def test_a_stale_run_whose_lock_is_held_again_is_read_anew(tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs")
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
    run.lock.touch()
    os.utime(run.events, (0, 0))
    assert keep(run).status == "stale"
    stamp, kept = file_stamp(run), FolderSummaries(run.path.parent)
    assert kept.known(run) is not None
    with run.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert file_stamp(run) == stamp
        assert kept.known(run) is None and kept.of(run).status == "running"


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text("{"),
        lambda file: file.write_text("[]"),
        lambda file: file.write_text(file.read_text().replace('"code": "', '"code": "x')),
        lambda file: file.write_text(file.read_text().replace('"status"', '"state"')),
        lambda file: os.chown(file, 12345, 12345),
    ],
)
def test_what_cannot_be_read_or_is_of_others_is_made_again(ended: RunDirectory, damage: Callable[[Path], None]) -> None:
    keep(ended)
    if os.geteuid() != 0 and damage.__code__.co_names == ("os", "chown"):
        pytest.skip("only root gives a file away")
    damage(kept_file())
    kept = FolderSummaries(ended.path.parent)
    assert kept.known(ended) is None and kept.of(ended) == summarise(ended)


def test_where_nothing_can_be_kept_the_list_is_the_same(
    ended: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "file"))
    assert keep(ended) == summarise(ended)


def test_others_cannot_read_what_is_kept(ended: RunDirectory) -> None:
    keep(ended)
    assert kept_file().stat().st_mode & 0o077 == 0 and kept_file().parent.stat().st_mode & 0o077 == 0
    assert json.loads(kept_file().read_text())["runs"].keys() == {str(ended.path)}
