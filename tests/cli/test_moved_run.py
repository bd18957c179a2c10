"""A run folder that is moved or removed while its engine works."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine.errors import EnvironmentProblem
from engine.journal.control import send_request
from engine.journal.directory import HeldRunDirectory, RunDirectory
from engine.journal.liveness import engine_process, identify
from engine.journal.summary import summarise
from tests.journal.waiting import until


def until_ended(pid: int) -> None:
    until(lambda: identify(pid) is None)


def test_a_moved_run_goes_on_where_it_is_and_leaves_nothing_behind(
    started: tuple[RunDirectory, int], tmp_path: Path
) -> None:
    run, pid = started
    moved = RunDirectory(tmp_path / "elsewhere" / run.name)
    moved.path.parent.mkdir()
    os.rename(run.path, moved.path)
    step = summarise(moved).step
    until(lambda: summarise(moved).step > step)
    send_request(moved, "stop")
    until_ended(pid)
    summary = summarise(moved)
    assert (summary.status, summary.exit_code, summary.checkpoints) == ("stopped", 130, [summary.step])
    assert engine_process(moved) is None and not run.path.exists()


def test_an_engine_whose_folder_is_removed_ends_and_makes_no_new_one(started: tuple[RunDirectory, int]) -> None:
    run, pid = started
    log = run.log.open("rb")
    os.rename(run.path, run.path.with_name("going"))
    shutil.rmtree(run.path.with_name("going"))
    until_ended(pid)
    assert not run.path.exists()
    with log:
        assert f"the run's folder {run.path} was removed".encode() in log.read()


def test_a_held_folder_is_found_where_it_went_until_it_is_removed(tmp_path: Path) -> None:
    place, moved = tmp_path / "run", tmp_path / "moved"
    place.mkdir()
    held = HeldRunDirectory(place)
    assert held.run_toml == place / "run.toml"
    os.rename(place, moved)
    place.mkdir()  # another folder took the name
    assert held.run_toml == moved / "run.toml"
    moved.rmdir()
    with pytest.raises(EnvironmentProblem, match="was removed"):
        _ = held.path
