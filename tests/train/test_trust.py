"""A run directory is another user's until this user's own state folder says what he allowed it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine.config.files.trust import keep_limits, shared_folder_warning, state_folder
from engine.config.load import brings_limits, dump_run_spec, load_run_spec
from engine.config.schema.run import Limits, RunSpec
from engine.errors import EnvironmentProblem, TunedeckError
from engine.evaluate.run import score_run
from engine.journal.directory import RunDirectory, rewrite_spec
from engine.journal.queue import Queue
from engine.launch.create_run import drop_untrusted_limits
from engine.launch.queue_worker import run_queue
from tests.train.run_helpers import make_spec, new_run, train, write_samples


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "state"))


def spec_with(folder: Path, **limits: object) -> RunSpec:
    made = make_spec(write_samples(folder / "samples.jsonl"), train={"max_steps": 1})
    return made.model_copy(update={"limits": Limits.model_validate(limits)})


def strangers(place: RunDirectory) -> RunDirectory:
    """The run, as if another user had made it."""
    shutil.rmtree(state_folder())
    return place


def test_the_command_of_a_strangers_run_is_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for place, executed in (
        (strangers(new_run(tmp_path / "runs", spec_with(tmp_path, on_finish=f"touch {mark}"))), False),
        (new_run(tmp_path / "runs", spec_with(tmp_path, on_finish=f"touch {mark}")), True),
    ):
        assert train(place)[0] == 0
        assert mark.exists() is executed


def test_the_queue_of_a_strangers_folder_executes_none_of_its_commands(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    place = strangers(new_run(tmp_path / "runs", spec_with(tmp_path, on_finish=f"touch {mark}")))
    Queue(tmp_path / "runs").add(place)
    run_queue(tmp_path / "runs")
    assert not mark.exists() and place.events.exists()


def test_a_strangers_run_brings_no_code_into_an_evaluation(tmp_path: Path) -> None:
    mark, model = tmp_path / "executed", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}}'
    )
    (model / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass EvilConfig: pass\n")
    samples = write_samples(tmp_path / "samples.jsonl")
    place = new_run(tmp_path / "runs", make_spec(samples, train={"max_steps": 1}, data={"valid_fraction": 0.25}))
    train(place)
    opened = {"id": str(model), "init": "pretrained"}
    spec = make_spec(samples, model=opened, data={"valid_fraction": 0.25})
    place.run_toml.write_text(dump_run_spec(spec.model_copy(update={"limits": Limits(trust_remote_code=True)})))
    with pytest.raises(TunedeckError, match="code"):
        score_run(place, None, lambda text: None)
    assert not mark.exists()


def test_a_run_that_another_user_has_changed_loses_its_limits(tmp_path: Path) -> None:
    place = new_run(tmp_path / "runs", spec_with(tmp_path, on_finish="mine", devices=[1]))
    assert load_run_spec(place.run_toml, own=True).limits.on_finish == "mine" and not brings_limits(place.run_toml)
    place.run_toml.write_text(place.run_toml.read_text().replace("mine", "theirs"))
    assert load_run_spec(place.run_toml, own=True).limits == Limits() and brings_limits(place.run_toml)
    assert "limits and commands were not set by you" in str(drop_untrusted_limits(place))
    assert drop_untrusted_limits(place) is None


def test_a_copy_elsewhere_has_to_be_allowed_again(tmp_path: Path) -> None:
    place = new_run(tmp_path / "runs", spec_with(tmp_path, on_finish="mine"))
    shutil.copytree(place.path, tmp_path / "copy")
    assert load_run_spec(tmp_path / "copy" / "run.toml", own=True).limits == Limits()
    rewrite_spec(RunDirectory(tmp_path / "copy"), place.run_toml.read_text())
    assert load_run_spec(tmp_path / "copy" / "run.toml", own=True).limits.on_finish == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_record_that_another_user_wrote_allows_nothing(tmp_path: Path) -> None:
    place = new_run(tmp_path / "runs", spec_with(tmp_path, on_finish="mine"))
    os.chown(state_folder() / "limits.jsonl", 65534, 65534)
    assert load_run_spec(place.run_toml, own=True).limits == Limits()


def test_limits_that_cannot_be_recorded_are_refused_and_a_run_without_any_is_not(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(EnvironmentProblem, match="your permissions for this run \\(on_finish\\) cannot be recorded"):
        keep_limits(tmp_path / "run.toml", dump_run_spec(spec_with(tmp_path, on_finish="mine")))
    keep_limits(tmp_path / "run.toml", dump_run_spec(spec_with(tmp_path)))


def test_a_runs_folder_that_everyone_may_write_is_warned_about(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir(mode=0o755)
    assert shared_folder_warning(folder) is None
    folder.chmod(0o1777)
    assert f"every user of this machine can write in {folder}" in str(shared_folder_warning(folder))
