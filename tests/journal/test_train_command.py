"""Arguments of `train` and `resume` that are wrong before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.cli import app
from engine.config.load import load_run_spec
from engine.config.schema.run import Limits
from engine.errors import EnvironmentProblem, UsageError
from engine.journal.directory import RunDirectory, rewrite_spec
from engine.journal.events import EventWriter
from engine.journal.index import list_runs
from engine.journal.liveness import claim
from engine.launch.resume_run import change_spec

SPEC = """schema = 1
kind = "run"
name = "demo"

[profile]
schema = 1
kind = "profile"
name = "demo"
[profile.device]
kind = "metered"
memory_gib = 0.25

[recipe]
schema = 1
kind = "recipe"
name = "demo"
[recipe.model]
id = "builtin:tiny"
tokenizer = "builtin:bytes"
[[recipe.data.sources]]
name = "dates"
path = "builtin:dates"
[recipe.train]
max_steps = 10
"""


def tunedeck(*arguments: str, folder: Path) -> Result:
    return CliRunner().invoke(app, [*arguments, "--runs", str(folder)])


@pytest.fixture
def ended(run: RunDirectory) -> RunDirectory:
    """A finished run of ten steps."""
    run.run_toml.write_text(SPEC)
    with EventWriter(run) as writer:
        writer.write("run_finished", status="done", exit_code=0, result="adapter")
    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing: -p PROFILE and -r RECIPE"),
        (["-p", "demo"], "missing: -r RECIPE"),
        (["-p", "demo", "-r", "demo", "--devices", "0,x"], "--devices '0,x'"),
        (["-p", "demo", "-r", "demo", "--devices", "1,1"], "--devices '1,1'"),
        (["-p", "demo", "-r", "demo", "--devices", "0,1"], "selects GPUs"),
        (["-p", "demo", "-r", "demo", "--name", "../up"], "up"),
        (["-p", "demo", "-r", "demo", "--run-spec", "x"], "--run-spec and -r"),
    ],
)
def test_train_refuses(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = tunedeck("train", *arguments, folder=tmp_path / "none")
    assert isinstance(result.exception, UsageError), result.exception
    assert words in result.exception.render()
    assert list_runs(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([], "is done"),
        (["train.max_steps=5"], "is done"),
        (["train.seed=5", "train.max_steps=20"], "train.seed: 0 -> 5"),
        (["model.id=other", "train.max_steps=20"], "model.id"),
        (["data.max_length=8", "train.max_steps=20"], "data.max_length"),
        (["data.sources.dates.limit=5", "train.max_steps=20"], "data.sources"),
    ],
)
def test_resume_refuses_and_leaves_the_spec_alone(ended: RunDirectory, sets: list[str], words: str) -> None:
    options = [part for text in sets for part in ("--set", text)]
    error = tunedeck("resume", "last", *options, folder=ended.path.parent).exception
    assert isinstance(error, UsageError) and words in error.render()
    assert ended.run_toml.read_text() == SPEC and not (ended.path / "run.1.toml").exists()


def test_a_longer_run_gets_a_new_spec_and_keeps_the_old_one(ended: RunDirectory) -> None:
    notices = change_spec(ended, ["train.max_steps=20"], {})
    assert any("cosine schedule is recomputed" in notice for notice in notices)
    assert "max_steps = 20" in ended.run_toml.read_text()
    assert (ended.path / "run.1.toml").read_text() == SPEC
    change_spec(ended, ["train.max_steps=30", "train.learning_rate=1e-5"], {})
    assert "max_steps = 20" in (ended.path / "run.2.toml").read_text()


@pytest.mark.parametrize(
    ("total", "limits", "sets", "ends"),
    [
        (10, "max_steps = 10", ["train.epochs=9"], "train.max_steps = 10 ends it"),
        (4, "max_steps = 10\nepochs = 1", ["train.max_steps=20"], "train.epochs = 1 ends it"),
        (10, "max_steps = 10\nepochs = 3", ["train.epochs=9"], "train.max_steps = 10 ends it"),
    ],
)
def test_a_limit_that_the_run_does_not_reach_makes_it_no_longer(
    run: RunDirectory, total: int, limits: str, sets: list[str], ends: str
) -> None:
    run.run_toml.write_text(SPEC.replace("max_steps = 10", limits))
    with EventWriter(run) as writer:
        writer.write("stage_started", max_steps=total)
        writer.write("run_finished", status="done", exit_code=0, result="adapter")
    with pytest.raises(UsageError, match=ends) as refused:
        change_spec(run, sets, {})
    typed = [text for text in refused.value.fix.split() if text.startswith("train.")]
    assert any("is extended" in notice for notice in change_spec(run, typed, {}))


def limits_after(ended: RunDirectory, **given: object) -> tuple[Limits, list[str]]:
    """The limits in run.toml after a resume that makes the run longer, and the notices for the user."""
    notices = change_spec(ended, ["train.max_steps=20"], given)
    return load_run_spec(ended.run_toml, own=True).limits, notices


LIMITS = """
[limits]
max_hours = 2.0
on_finish = "echo done"
"""


def test_the_limits_of_the_last_start_stay_unless_said_otherwise(ended: RunDirectory) -> None:
    rewrite_spec(ended, SPEC + LIMITS)
    kept, notices = limits_after(ended, max_hours=5.0)
    assert (kept.max_hours, kept.on_finish) == (5.0, "echo done")
    assert not any("left out" in notice for notice in notices)


def test_a_run_directory_from_elsewhere_brings_no_command_to_run(ended: RunDirectory) -> None:
    ended.run_toml.write_text(SPEC + LIMITS)
    kept, notices = limits_after(ended, max_hours=5.0)
    assert (kept.max_hours, kept.on_finish) == (5.0, None)
    assert any("limits and commands were not set by you" in notice for notice in notices)


def test_devices_that_the_new_profile_does_not_have_are_left_out_and_said(ended: RunDirectory) -> None:
    rewrite_spec(ended, SPEC + "\n[limits]\ndevices = [3]\n")
    kept, notices = limits_after(ended)
    assert kept.devices == []
    assert any("devices of the last start are not used" in notice for notice in notices)


def test_a_run_that_an_engine_works_on_is_not_resumed(ended: RunDirectory) -> None:
    with claim(ended):
        error = tunedeck("resume", "last", "--set", "train.max_steps=20", folder=ended.path.parent).exception
    assert isinstance(error, EnvironmentProblem)
    assert ended.run_toml.read_text() == SPEC
