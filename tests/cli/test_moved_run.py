"""A run folder that is moved or removed while its engine works, and a runs folder whose queue is worked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import EnvironmentProblem
from engine.journal.control import send_request
from engine.journal.directory import HeldRunDirectory, RunDirectory
from engine.journal.liveness import engine_process, identify
from engine.journal.queue import Queue
from engine.journal.summary import summarise
from engine.launch.process import ENTRY_FILE
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe
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


@pytest.fixture
def starter(tmp_path: Path, tunedeck: Tunedeck) -> subprocess.Popen[str]:
    """`queue start` of two runs, of which the first takes steps."""
    recipe = write_recipe(tmp_path, ("max_steps = 2", "max_steps = 400"), ("every_steps = 1", "every_steps = 400"))
    for name in ("one", "two"):
        assert tunedeck("queue", "add", "-p", write_profile(tmp_path), "-r", recipe, "--name", name).code == 0
    words = [sys.executable, "-P", str(ENTRY_FILE), "queue", "start"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    (one,) = (tmp_path / "runs").glob("*-one")
    until(lambda: summarise(RunDirectory(one)).step > 0)
    return process


def test_a_queue_goes_on_where_its_runs_folder_is_moved(starter: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "runs").rename(tmp_path / "moved")
    told, _ = starter.communicate()
    runs = [RunDirectory(path) for path in (tmp_path / "moved").glob("2*")]
    assert starter.returncode == 0 and [summarise(run).status for run in runs] == ["done", "done"]
    assert [f"{run.name}: done at step 400" in told for run in runs] == [True, True]
    assert not (tmp_path / "runs").exists()


def test_a_queue_whose_runs_folder_is_removed_ends_and_makes_no_new_one(
    starter: subprocess.Popen[str], tmp_path: Path
) -> None:
    worker = Queue(tmp_path / "runs").read().worker
    assert worker is not None
    (tmp_path / "runs").rename(tmp_path / "going")
    shutil.rmtree(tmp_path / "going")
    _, said = starter.communicate()
    assert starter.returncode == 6 and f"the runs folder {tmp_path / 'runs'} was removed" in said
    until_ended(worker.pid)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "going").exists()
