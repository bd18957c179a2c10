"""Each request is handed out once; a claim belongs to one living process and ends with that process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import EnvironmentProblem
from engine.journal import control
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.files import ABANDONED_SECONDS
from engine.journal.liveness import (
    claim,
    engine_process,
    identify,
    is_alive,
    process_state,
    refuse_if_claimed,
)
from tests.journal.conftest import Spawn
from tests.journal.run_directories import new_run
from tests.journal.waiting import until


def test_a_request_is_handed_out_once_in_the_order_of_asking(run: RunDirectory) -> None:
    control.send_request(run, "checkpoint")
    control.send_request(run, "stop", reason="by hand")
    inbox = control.ControlInbox(run)
    taken = inbox.poll()
    assert [asked.name for asked in taken] == ["checkpoint", "stop"]
    assert taken[1].fields == {"reason": "by hand"}
    assert inbox.poll() == [] and not list(run.control.glob("*.json"))


def test_an_unknown_request_is_refused_and_a_foreign_file_is_not_obeyed(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="unknown request"):
        control.send_request(run, "explode")
    (run.control / "00000000000000000001-stop.json").write_text('{"request": "explode"}')
    (run.control / "00000000000000000002-stop.json").write_text("not json")
    assert control.ControlInbox(run).poll() == []


def test_a_claim_names_its_process_and_keeps_others_out(run: RunDirectory, spawn: Spawn) -> None:
    child = spawn(run, "ignore")
    until(run.events.exists)
    identity = engine_process(run)
    assert identity is not None and identity.pid == child.pid and is_alive(identity)
    with pytest.raises(EnvironmentProblem, match=str(child.pid)) as caught, claim(run):
        pass
    assert caught.value.exit_code == 6
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert process_state(identity) == "gone"
    with claim(run) as ours:
        assert ours.pid == os.getpid()


def test_a_claim_left_in_order_leaves_nobody_on_record(run: RunDirectory) -> None:
    with claim(run):
        assert engine_process(run) is not None
    assert engine_process(run) is None


def test_a_zombie_is_not_alive(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(child.pid)
    assert identity is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    os.kill(child.pid, 0)
    assert not is_alive(identity)
    child.communicate()


def test_another_process_with_the_same_pid_is_not_the_engine() -> None:
    ours = identify(os.getpid())
    assert ours is not None and is_alive(ours)
    assert process_state(replace(ours, started=ours.started + "1")) == "gone"
    assert process_state(replace(ours, started="another-boot:1")) == "gone"
    assert process_state(replace(ours, host="elsewhere")) == "remote"


def test_a_forked_worker_that_outlives_its_engine_does_not_keep_the_claim(run: RunDirectory) -> None:
    fork = multiprocessing.get_context("fork")
    begun, gate = fork.Event(), fork.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    with claim(run):
        worker = fork.Process(target=work)
        worker.start()
        begun.wait()
    try:
        refuse_if_claimed(run)
        assert worker.is_alive()
    finally:
        gate.set()
        worker.join()


def test_a_new_run_is_complete_and_a_collision_gets_a_number(tmp_path: Path) -> None:
    runs = [new_run(tmp_path) for _ in range(4)]
    assert len({run.name for run in runs}) == 4
    assert all(run.exists() and json.loads(run.plan_json.read_text())["verdict"] == "fits_smaller" for run in runs)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_folder_that_cannot_be_written_is_exit_6(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem) as caught:
        create_run_directory(tmp_path / "file" / "runs", "x", "", {})
    assert caught.value.exit_code == 6


def test_a_claim_removes_what_a_killed_process_was_writing_and_nothing_that_is_being_written(run: RunDirectory) -> None:
    names = [".engine.json.0123456789ab.tmp", ".best.0123456789ab.tmp", ".mine.tmp", ".x.0123456789ab.tmp"]
    files = [run.path / names[0], run.checkpoints / names[1], run.path / names[2], run.path / names[3]]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("{")
    for file in files[:3]:
        os.utime(file, (long_ago := time.time() - 2 * ABANDONED_SECONDS, long_ago))
    with claim(run):
        assert [file.exists() for file in files] == [False, False, True, True]
        files[1].write_text("{")  # while the engine works
    assert [file.exists() for file in files] == [False, True, True, False]
