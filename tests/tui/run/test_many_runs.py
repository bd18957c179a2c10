"""Lists of thousands of runs: what is looked at for each refresh, and that every change is found all the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.folder_summaries import FileStamp, file_stamp
from engine.journal.index import list_runs
from tests.journal.run_directories import new_run
from tui.run import listing
from tui.run.listing import RunList
from tui.run.table import matcher
from tui.run.tree import RunTree

RUNS = 12


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of ended runs, of which two are looked at first and two in turn."""
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(listing, "CHECKED_FIRST", 2)
    monkeypatch.setattr(listing, "CHECKED_IN_TURN", 2)
    for number in range(RUNS):
        end(new_run(tmp_path / "runs", f"run-{number}"), "done")
    return tmp_path / "runs"


def end(run: RunDirectory, status: str) -> None:
    with EventWriter(run) as writer:
        writer.write("run_finished", status=status, exit_code=0, result=None)


def read(runs: RunList) -> RunList:
    while not runs.refresh(seconds=60.0) or runs.unread:
        pass
    return runs


def test_a_refresh_looks_at_a_few_runs_and_finds_every_change_in_turn(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read(RunList.of_folder(runs))
    looked: list[RunDirectory] = []

    def watched(run: RunDirectory) -> FileStamp:
        looked.append(run)
        return file_stamp(run)

    monkeypatch.setattr(listing, "file_stamp", watched)
    found.refresh(seconds=60.0)
    assert len(looked) == 4
    oldest = found.entries[-1]
    end(oldest.directory, "failed")
    for _ in range(RUNS // 2):
        found.refresh(seconds=60.0)
    assert oldest.summary is not None and oldest.summary.status == "failed"


def test_new_and_removed_runs_are_listed_at_once_and_in_order(runs: Path) -> None:
    found = read(RunList.of_folder(runs))
    for _ in range(2):
        made = new_run(runs, "later")
        shutil.rmtree(found.entries[3].directory.path)
        (runs / "no-run").mkdir(exist_ok=True)
        found.refresh(seconds=60.0)
        assert [entry.directory for entry in found.entries] == list_runs(runs)
        assert found.has(made.path)


def test_a_run_toml_that_comes_later_is_found(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(RunList.of_folder(runs))
    spec = found.entries[0].directory.run_toml.read_bytes()
    (runs / "by-hand").mkdir()
    os.utime(runs, (0, 0))  # long ago: the folder counts as unchanged from now on
    found.refresh(seconds=60.0)
    (runs / "by-hand" / "run.toml").write_bytes(spec)
    os.utime(runs, (0, 0))
    monkeypatch.setattr(listing, "LISTED_IN_TURN", 5)
    for _ in range(RUNS // 5 + 1):
        found.refresh(seconds=60.0)
    assert found.has(runs / "by-hand")
    spec_file = found.entries[-1].directory.run_toml
    spec_file.unlink()
    os.utime(runs, (0, 0))
    for _ in range(RUNS // 5 + 1):
        found.refresh(seconds=60.0)
    assert not found.has(spec_file.parent)


def test_rows_are_made_again_only_where_something_has_changed(runs: Path) -> None:
    tree = RunTree(read(RunList.of_folder(runs)))
    rows = tree.rows()
    tree.refresh(seconds=60.0)
    assert tree.rows() is rows
    end(tree.runs.entries[0].directory, "failed")
    tree.refresh(seconds=60.0)
    assert tree.rows() is not rows
    assert [row.name for row in tree.rows(matcher("state:failed"))] == [tree.rows()[0].name]
