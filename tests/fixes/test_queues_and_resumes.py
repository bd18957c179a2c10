"""Fixes of the queue, of claimed runs, and of runs that are resumed or merged: what each says is typed, and helps."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.config.load import dump_run_spec
from engine.errors import TunedeckError
from engine.journal.chats import create_chat
from engine.journal.directory import RunDirectory
from engine.journal.liveness import engine_process, identify, identify_self, refuse_if_claimed
from engine.journal.queue import Queue
from engine.journal.stages import result_run
from engine.journal.summary import summarise
from engine.launch import queue_worker
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import make_run, write_recipe
from tests.fixes.conftest import Given
from tests.fixes.rows import text_of, was_given
from tests.fixes.test_endings import STAGES
from tests.handover.test_push import finished, hub, made
from tests.train.run_helpers import make_spec, new_run, train, write_samples
from tui import app as tui_app
from tui.arguments import Flags

__all__ = ["finished", "hub", "made"]

WALKED = (
    "journal/liveness:_run_lock: {_way", "journal/liveness:engine_process", "journal/chats:create_chat",
    "journal/queue:_refuse_second_worker", "journal/stages:result_run", "launch/queue_worker:_ending",
    "launch/queue_worker:follow_queue", "launch/queue_worker:start_queue_worker",
    "launch/queue_worker:wait_until_registered: see its runs", "launch/queue_worker:wait_until_registered: see {queue",
    "tui/app:_check: use a command", "tui/app:_check: tunedeck --help", "train/run/identity:check: restore these keys",
    "train/step/transaction:_finish_step: lower train.learning_rate or",
    "extras/handover/merge:_require_space: free space", "extras/handover/merge:merge: free space",
)  # fmt: skip
"""The fix texts that the tests below execute."""


def refused_as(key: str, given: Given) -> str:
    """The fix that was given."""
    assert was_given(text_of(key), given), given
    fix = given[-1][1]
    given.clear()
    return fix


def typed(fix: str) -> list[str]:
    """The last command of a fix."""
    return shlex.split(fix.rpartition("tunedeck ")[2])


def test_a_run_that_is_worked_on_is_free_once_it_was_stopped(
    tunedeck: Tunedeck, started: tuple[RunDirectory, int], given: Given
) -> None:
    run, _ = started
    with pytest.raises(TunedeckError):
        refuse_if_claimed(run)
    command = typed(refused_as("journal/liveness:_run_lock: {_way", given))
    assert command == ["stop", run.name] and tunedeck(*command).code == 0
    assert tunedeck("wait", run.name).code == 130
    refuse_if_claimed(run)


def test_a_damaged_record_of_an_engine_is_removed(tmp_path: Path, given: Given) -> None:
    run = make_run(tmp_path, write_recipe(tmp_path))
    run.engine.write_text("{")
    with pytest.raises(TunedeckError):
        engine_process(run)
    refused_as("journal/liveness:engine_process", given)
    run.engine.unlink()
    assert engine_process(run) is None


def test_a_chat_is_kept_in_another_folder(tmp_path: Path, given: Given) -> None:
    (tmp_path / ".chats").write_text("")
    with pytest.raises(TunedeckError):
        create_chat(tmp_path, {})
    refused_as("journal/chats:create_chat", given)
    assert create_chat(tmp_path / "other", {}).path.is_dir()


def test_without_a_terminal_a_command_shows_the_runs(tunedeck: Tunedeck, tmp_path: Path, given: Given) -> None:
    run = make_run(tmp_path, write_recipe(tmp_path))
    with pytest.raises(TunedeckError):
        tui_app._check(Flags(ascii=True))
    assert run.name in tunedeck(*typed(refused_as("tui/app:_check: use a command", given))).out


def test_a_setting_without_a_value_is_explained_by_the_help(tunedeck: Tunedeck, given: Given) -> None:
    with pytest.raises(TunedeckError):
        tui_app._check(Flags(overrides=("train.max_steps",)))
    assert "--set KEY=VALUE" in tunedeck(*typed(refused_as("tui/app:_check: tunedeck --help", given))).out


def test_a_last_stage_that_has_not_begun_is_shown_with_its_run(
    tunedeck: Tunedeck, tmp_path: Path, given: Given
) -> None:
    run = make_run(tmp_path, write_recipe(tmp_path, more=STAGES))
    run.stages.mkdir()
    with pytest.raises(TunedeckError):
        result_run(run)
    answer = tunedeck(*typed(refused_as("journal/stages:result_run", given)))
    assert answer.code == 0 and run.name in answer.out


def test_a_second_worker_ends_and_the_first_is_seen_in_the_list(
    tunedeck: Tunedeck, tmp_path: Path, given: Given
) -> None:
    run = make_run(tmp_path, write_recipe(tmp_path))
    queue = Queue(run.path.parent)
    queue.add(run)
    first = subprocess.Popen(["sleep", "60"])
    try:
        identity = identify(first.pid)
        assert identity is not None
        queue.register_worker(identity)
        with pytest.raises(TunedeckError):
            queue.register_worker(identify_self())
        commands = [typed(refused_as("journal/queue:_refuse_second_worker", given))]
        late = subprocess.Popen(["false"])
        late.wait()
        with pytest.raises(TunedeckError):
            queue_worker.wait_until_registered(queue, late)
        commands.append(typed(refused_as("launch/queue_worker:wait_until_registered: see its runs", given)))
        for command in commands:
            answer = tunedeck(*command)
            assert (
                answer.code == 0
                and f"the queue is running (process {first.pid})" in answer.err
                and run.name in answer.out
            )
    finally:
        first.kill()
        first.wait()
    with pytest.raises(TunedeckError, match="ended with 1"):
        queue_worker.wait_until_registered(queue, late)
    fix = refused_as("launch/queue_worker:wait_until_registered: see {queue", given)
    assert str(queue.log) in fix and tunedeck(*typed(fix)).code == 0
    assert summarise(run).status == "done"


def test_a_queue_whose_worker_or_engine_is_gone_goes_on_as_it_says(
    tunedeck: Tunedeck, tmp_path: Path, given: Given
) -> None:
    recipe = write_recipe(tmp_path)
    run, other = (make_run(tmp_path, recipe) for _ in range(2))
    queue = Queue(run.path.parent)
    queue.add(run)
    worker = subprocess.Popen(["sleep", "60"])
    identity = identify(worker.pid)
    assert identity is not None
    queue.register_worker(identity)
    worker.kill()
    worker.wait()
    list(queue_worker.follow_queue(queue, worker.pid, [run.name]))
    assert tunedeck(*typed(refused_as("launch/queue_worker:follow_queue", given))).code == 0
    assert summarise(run).status == "done"
    other.log.write_text("tunedeck: engine.lock cannot be written: Read-only file system\n")
    queue_worker._ending(other)
    fix = refused_as("launch/queue_worker:_ending", given)
    log, _, further = fix.partition(";")
    assert "Read-only" in tunedeck(*typed(log)).out
    assert tunedeck(*typed(further)).code == 0 and summarise(other).status == "done"


def test_a_queue_that_cannot_be_logged_is_worked_in_another_folder(
    tunedeck: Tunedeck, tmp_path: Path, given: Given
) -> None:
    run = make_run(tmp_path, write_recipe(tmp_path))
    queue = Queue(run.path.parent)
    queue.add(run)
    queue.log.mkdir()
    assert tunedeck("queue", "start").code == 6
    refused_as("launch/queue_worker:start_queue_worker", given)
    assert tunedeck("queue", "add", "--run-spec", run.run_toml, "--runs", tmp_path / "other").code == 0
    answer = tunedeck("queue", "start", "--runs", tmp_path / "other")
    assert answer.code == 0, answer.err


def test_keys_that_are_put_back_are_resumed_with(tmp_path: Path, given: Given) -> None:
    samples = write_samples(tmp_path / "rows.jsonl", count=16)
    sound, changed = (
        make_spec(samples, train={"max_steps": 2, "batch_size": 2, "learning_rate": 1e-3, "seed": seed})
        for seed in (3, 4)
    )
    place = new_run(tmp_path / "runs", sound)
    assert train(place)[0] == 0
    place.run_toml.write_text(dump_run_spec(changed))
    assert train(place, resume=True)[0] == 2
    refused_as("train/run/identity:check: restore these keys", given)
    place.run_toml.write_text(dump_run_spec(sound))
    assert train(place, resume=True)[0] == 0


def test_a_merged_model_goes_where_there_is_room(
    tunedeck: Tunedeck, finished: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Given
) -> None:
    (tmp_path / "file").write_text("")
    assert tunedeck("merge", finished.name, "--out", tmp_path / "file" / "merged").code == 6
    refused_as("extras/handover/merge:merge: free space", given)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
        assert tunedeck("merge", finished.name).code == 6
    refused_as("extras/handover/merge:_require_space: free space", given)
    answer = tunedeck("merge", finished.name, "--out", tmp_path / "merged")
    assert answer.code == 0, answer.err


def test_gradients_that_overflow_are_finite_with_a_lower_rate_or_norm(tmp_path: Path, given: Given) -> None:
    samples = write_samples(tmp_path / "rows.jsonl", count=16)
    steep = {"max_steps": 4, "batch_size": 2, "optimizer": "sgd", "warmup_steps": 0, "learning_rate": 1e6}
    runs = [{"max_grad_norm": 1e9}, {"max_grad_norm": 1e9, "learning_rate": 1e-3}, {"max_grad_norm": 1e-9}]
    codes = []
    for change in runs:
        codes.append(train(new_run(tmp_path / "runs", make_spec(samples, train={**steep, **change})))[0])
        if codes == [7]:
            refused_as("train/step/transaction:_finish_step: lower train.learning_rate or", given)
    assert codes == [7, 0, 0]
