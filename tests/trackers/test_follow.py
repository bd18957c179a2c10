"""Trackers get every step and evaluation of a journal exactly once, also when the process that forwards is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.checks import machine
from engine.checks.machine import require_trackers
from engine.config.load import resolve
from engine.errors import EnvironmentProblem
from engine.extras.trackers.follow import forward_all, open_tracker, tracked_run
from engine.extras.trackers.tensorboard_tracker import TensorBoardTracker
from engine.extras.trackers.tracker import Point, Tracker, point_of
from engine.extras.trackers.trackio_tracker import TrackioTracker
from engine.extras.trackers.wandb_tracker import WandbTracker
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.forwarding import read_record
from tests.trackers.look_alikes import (
    TRACKERS,
    calls_of_wandb,
    install,
    new_run,
    points_of,
    records_of_tensorboard,
    write_eval,
    write_step,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose journal has two steps and an evaluation."""
    install(monkeypatch, tmp_path)
    directory = new_run(tmp_path / "runs")
    with EventWriter(directory) as writer:
        write_step(writer, 1)
        write_eval(writer, 1)
        write_step(writer, 2)
    return directory


FIRST = [(1, "train/loss"), (1, "eval/loss"), (2, "train/loss")]


def test_numbers_of_step_and_evaluation_are_metrics_and_nothing_else_is() -> None:
    common = {"seq": 7, "time": "2026-11-23T06:00:00.500Z", "stage": "", "rank": 0}
    used = {"mean": [0.5, 0.5], "least": 0.25, "most": 0.75, "entropy": 0.9, "layer": 3}
    event = {**common, "kind": "step", "step": 3, "loss": 2.5, "mfu": None, "expert_utilisation": used}
    expected = {"train/loss": 2.5, "experts/least": 0.25, "experts/most": 0.75, "experts/entropy": 0.9}
    assert point_of(event) == Point(7, 1795413600.5, 3, expected)
    assert point_of({**common, "kind": "eval", "step": 0, "metrics": {"rougeL": 0.5, "loss": None}}) == Point(
        7, 1795413600.5, 0, {"eval/rougeL": 0.5}
    )
    assert point_of({**common, "kind": "eval", "step": 0, "metrics": {"loss": None}}) is None
    assert point_of({**common, "kind": "heartbeat"}) is None


@pytest.mark.parametrize("name", TRACKERS)
def test_each_event_is_forwarded_once(run: RunDirectory, name: str) -> None:
    assert forward_all(run, name) == 3 and forward_all(run, name) == 0
    assert points_of(run, name) == FIRST
    with EventWriter(run) as writer:
        writer.write("resumed", **{"step": 1, "from": "step-00000001"})
        write_step(writer, 2)
        write_step(writer, 3)
    assert forward_all(run, name) == 2
    assert points_of(run, name) == [*FIRST, (2, "train/loss"), (3, "train/loss")]
    assert read_record(run, name).seq == 6


@pytest.mark.parametrize("name", TRACKERS)
def test_a_process_that_is_killed_before_it_remembers_forwards_nothing_twice(run: RunDirectory, name: str) -> None:
    forward_all(run, name)
    with EventWriter(run) as writer:
        write_step(writer, 3)
    killed: Tracker = open_tracker(tracked_run(run, name), name, read_record(run, name).position)
    killed.forward(Point(4, 0.0, 3, {"train/loss": 3.0}))
    killed.position()  # on its way to the disk, but not in the record
    forward_all(run, name)
    assert points_of(run, name) == [*FIRST, (3, "train/loss")]


def test_tensorboard_drops_the_steps_that_a_resume_does_again(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        writer.write("resumed", **{"step": 1, "from": "step-00000001"})
    forward_all(run, "tensorboard")
    (restart,) = [record for record in records_of_tensorboard(run) if "session_log" in record]
    assert restart["step"] == 2 and restart["session_log"] == {"status": 1}


def test_a_tracker_shows_the_run_with_its_recipe_project_and_stage(run: RunDirectory, tmp_path: Path) -> None:
    mine = new_run(tmp_path / "mine", "trackers.project=mine", 'trackers.tags=["one"]', 'trackers.use=["wandb"]')
    with EventWriter(mine) as writer:
        writer.write("run_finished", status="failed", exit_code=7, result=None)
    forward_all(mine, "wandb")
    first, axis, last = calls_of_wandb(mine)
    assert (first["init"], first["project"], first["tags"], first["recipe"]) == (mine.name, "mine", ["one"], "demo")
    assert axis["over"] == "train/global_step" and last == {"finish": 7}
    stage = RunDirectory(run.stages / "01-vision")
    stage.path.mkdir(parents=True)
    stage.run_toml.write_text(run.run_toml.read_text())
    shown = tracked_run(stage, "wandb")
    assert (shown.name, shown.group, shown.project) == (f"{run.name}/vision", run.name, "tunedeck")


def test_a_failure_is_recorded_with_what_to_do(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_LOOK_ALIKE", "no key")
    with pytest.raises(EnvironmentProblem, match="wandb login"):
        forward_all(run, "wandb")
    record = read_record(run, "wandb")
    assert "No API key" in record.error and f"tunedeck sync {run.path}" in record.fix
    monkeypatch.delenv("WANDB_LOOK_ALIKE")
    assert forward_all(run, "wandb") == 3 and read_record(run, "wandb").error == ""


def test_every_tracker_of_the_schema_can_be_opened(run: RunDirectory) -> None:
    classes = (TensorBoardTracker, WandbTracker, TrackioTracker)
    assert [type(open_tracker(tracked_run(run, name), name, None)) for name in TRACKERS] == list(classes)


def test_a_package_that_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolve("demo", "demo", ['trackers.use=["wandb", "trackio"]']).spec.recipe
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "wandb" else name)
    with pytest.raises(EnvironmentProblem) as caught:
        require_trackers(recipe)
    assert "wandb is not installed" in caught.value.found
    assert "pip install wandb" in caught.value.fix and "trackers.use=[]" in caught.value.fix
    require_trackers(recipe.model_copy(update={"trackers": recipe.trackers.model_copy(update={"use": ["trackio"]})}))
    require_trackers(resolve("demo", "demo").spec.recipe)


def test_of_steps_that_a_resume_does_again_wandb_gets_the_last_if_the_resume_is_known(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        writer.write("resumed", **{"step": 1, "from": "step-00000001"})
        write_step(writer, 2)
    assert forward_all(run, "wandb") == 3
    assert points_of(run, "wandb") == [(1, "train/loss"), (1, "eval/loss"), (2, "train/loss")]
    assert [call["step"] for call in calls_of_wandb(run) if "data" in call] == [1, 2, 5]


HANGING = """
import sys, threading
from engine.journal.directory import RunDirectory
from engine.extras.trackers import follow

class Hanging:
    last_seq, replaces_steps = None, False
    def __init__(self, run, position): pass
    def position(self): return {{}}
    def rewind(self, step): pass
    def forward(self, point): {forward}
    def close(self, code): {close}

follow.TRACKER_CLASSES["wandb"] = Hanging
follow.CALL_SECONDS = 0.2
follow.forward_all(RunDirectory(__import__("pathlib").Path(sys.argv[1])), "wandb")
"""


@pytest.mark.parametrize("where", ["forward", "close"])
def test_a_tracker_that_hangs_is_ended_and_says_so(run: RunDirectory, where: str) -> None:
    bodies = {"forward": "pass", "close": "return {}", where: "threading.Event().wait()"}
    command = [sys.executable, "-c", HANGING.format(**bodies), str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "tracker wandb did not respond for 0.2 s" in done.stderr
    record = read_record(run, "wandb")
    assert "did not respond for 0.2 s" in record.error and record.fix.endswith(f"tunedeck sync {run.path} --to wandb")
