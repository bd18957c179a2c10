"""The queue: order, what may wait in it, and who may work on it. Runs here are directories without an engine."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EnvironmentProblem, UsageError
from engine.journal.control import send_request
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventWriter
from engine.journal.index import move_to_trash
from engine.journal.liveness import ProcessIdentity, claim, identify
from engine.journal.queue import Queue
from engine.journal.summary import summarise
from engine.launch import queue_worker
from engine.launch.process import ENTRY_FILE
from engine.launch.queue_worker import run_queue


def waiting_run(folder: Path, name: str) -> RunDirectory:
    return create_run_directory(folder, name, f'name = "{name}"\n', {})


@pytest.fixture
def three(tmp_path: Path) -> tuple[Queue, list[str]]:
    queue = Queue(tmp_path)
    runs = [waiting_run(tmp_path, name) for name in ("a", "b", "c")]
    for run in runs:
        queue.add(run)
    return queue, [run.name for run in runs]


def myself() -> ProcessIdentity:
    found = identify(os.getpid())
    assert found is not None
    return found


def test_runs_wait_in_the_order_they_came(three: tuple[Queue, list[str]]) -> None:
    queue, names = three
    assert queue.read().waiting == names


def test_a_run_can_be_put_first_moved_and_removed(three: tuple[Queue, list[str]], tmp_path: Path) -> None:
    queue, (a, b, c) = three
    urgent = waiting_run(tmp_path, "urgent")
    assert queue.add(urgent, first=True).waiting == [urgent.name, a, b, c]
    queue.move(a, 99)
    queue.move(c, 1)
    queue.remove(b)
    assert queue.read().waiting == [c, urgent.name, a]


def test_a_run_that_cannot_be_started_is_marked_failed_and_the_next_one_is_tried(
    three: tuple[Queue, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue, names = three
    for name in names:
        queue.run(name).log.mkdir()  # so that opening engine.log is an OSError
    handler = signal.getsignal(signal.SIGTERM)
    try:
        run_queue(tmp_path)
    finally:
        signal.signal(signal.SIGTERM, handler)
    state = queue.read()
    assert (state.waiting, state.current, state.worker) == ([], None, None)
    for name in names:
        summary = summarise(queue.run(name))
        assert (summary.status, summary.exit_code) == ("failed", 6)
        assert f"could not be started: {queue.run(name).log} cannot be written: Is a directory" in str(
            summary.last_error
        )
    assert "no run is waiting" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "fix"), [(errno.ENOSPC, "free space"), (errno.EACCES, "change its permissions")])
def test_a_start_that_the_disk_refuses_names_the_fix(
    three: tuple[Queue, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    def refused(directory: RunDirectory) -> Any:
        raise OSError(number, os.strerror(number), str(directory.engine))

    monkeypatch.setattr(queue_worker, "start_engine", refused)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        run_queue(tmp_path)
    finally:
        signal.signal(signal.SIGTERM, handler)
    queue, names = three
    for name in names:
        summary = summarise(queue.run(name))
        assert f"{queue.run(name).engine} cannot be" in str(summary.last_error) and fix in str(summary.last_error)
        assert summary.exit_code == EnvironmentProblem.exit_code


def test_a_list_that_a_killed_process_was_writing_is_removed_at_the_next_change(
    three: tuple[Queue, list[str]],
) -> None:
    queue, names = three
    (queue.folder / ".order.json.0123456789ab.tmp").write_text("{")
    queue.remove(names[0])
    assert sorted(path.name for path in queue.folder.iterdir()) == ["lock", "order.json"]


def test_a_run_in_the_making_is_removed_once_its_process_must_be_gone(tmp_path: Path) -> None:
    for name, hours in ((".new-old", 25), (".new-young", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").write_text("")
        os.utime(tmp_path / name, (long_ago := time.time() - 3600 * hours, long_ago))
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_SH)  # as a process that makes a run here
        run = waiting_run(tmp_path, "a")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".new-young", run.name]
    finally:
        os.close(other)
    second = waiting_run(tmp_path, "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([run.name, second.name])


def test_what_does_not_wait_cannot_be_moved(three: tuple[Queue, list[str]]) -> None:
    queue, names = three
    with pytest.raises(UsageError, match="is not waiting"):
        queue.move("nobody", 1)
    assert queue.read().waiting == names


def test_a_run_that_was_started_by_hand_no_longer_waits(three: tuple[Queue, list[str]], tmp_path: Path) -> None:
    queue, (a, b, c) = three
    with EventWriter(RunDirectory(tmp_path / b)) as writer:
        writer.write("run_started", run=b, pid=1, world_size=1, versions={})
    assert queue.read().waiting == [a, c]
    with pytest.raises(UsageError, match="already been started"):
        queue.add(RunDirectory(tmp_path / b))


def test_a_run_that_vanished_no_longer_waits(three: tuple[Queue, list[str]], tmp_path: Path) -> None:
    queue, (a, b, c) = three
    move_to_trash(RunDirectory(tmp_path / a))
    assert queue.read().waiting == [b, c]


def test_a_worker_takes_one_after_another_and_leaves_an_empty_queue(three: tuple[Queue, list[str]]) -> None:
    queue, names = three
    taken = []
    while (run := queue.take_next(myself())) is not None:
        assert queue.read().current == run.name and queue.read().worker == myself()
        taken.append(run.name)
    assert taken == names
    assert queue.read().worker is None and queue.read().current is None


def test_a_worker_of_a_sweep_takes_its_runs_alone(three: tuple[Queue, list[str]]) -> None:
    queue, (a, b, c) = three
    assert queue.limit_worker([b]) is None
    taken = queue.take_next(myself())
    assert taken is not None and taken.name == b
    assert queue.read().left_waiting == [a, c]
    assert queue.take_next(myself()) is None
    assert queue.read().waiting == [a, c]


def test_who_starts_the_queue_beside_a_sweep_starts_all_of_it(three: tuple[Queue, list[str]]) -> None:
    queue, (a, b, c) = three
    queue.limit_worker([b])
    queue.take_next(myself())
    assert queue.limit_worker([c]) == myself() and queue.read().left_waiting == [a]
    assert queue.limit_worker(None) == myself() and queue.read().left_waiting == []
    assert queue.limit_worker([c]) == myself()  # a second sweep takes nothing from the owner
    taken = queue.take_next(myself())
    assert taken is not None and taken.name == a


def test_a_second_worker_is_refused_and_a_dead_one_replaced(three: tuple[Queue, list[str]]) -> None:
    queue, _ = three
    parent = identify(os.getppid())
    assert parent is not None
    queue.take_next(parent)
    with pytest.raises(EnvironmentProblem, match="is already running"):
        queue.take_next(myself())
    queue.clear_worker()
    queue.take_next(ProcessIdentity(2**22 + 1, "long ago", parent.host))
    assert queue.read().worker is None
    assert queue.take_next(myself()) is not None


DAMAGED = {
    "torn": "{",
    "deep": "[" * 100_000,
    "no list": '{"waiting": "abc", "current": null, "worker": null}',
    "no worker": '{"waiting": [], "current": null, "worker": [1]}',
    "no limit": '{"waiting": [], "current": null, "worker": null, "limited_to": "abc"}',
    "a path": '{"waiting": ["../elsewhere/run"], "current": null, "worker": null}',
    "a name that no folder has": json.dumps({"waiting": ["x" * 256], "current": None, "worker": None}),
    "half a character": '{"waiting": ["\\ud800"], "current": null, "worker": null}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_list_is_said_and_nothing_is_overwritten(three: tuple[Queue, list[str]], text: str) -> None:
    queue, names = three
    (queue.folder / "order.json").write_text(text, "utf-8")
    with pytest.raises(EnvironmentProblem, match="cannot be read"):
        queue.remove(names[0])
    assert (queue.folder / "order.json").read_text("utf-8") == text


def test_a_worker_that_finds_another_one_ends_and_its_starter_says_so(three: tuple[Queue, list[str]]) -> None:
    """As the slower of two `queue start`: both looked before one of them had its worker."""
    queue, names = three
    parent = identify(os.getppid())
    assert parent is not None
    queue.register_worker(parent)
    late = subprocess.Popen([sys.executable, "-P", str(ENTRY_FILE), "_queue_worker", str(queue.runs_dir)])
    with pytest.raises(EnvironmentProblem, match=f"already running: process {parent.pid}") as caught:
        queue_worker.wait_until_registered(queue, late)
    assert caught.value.exit_code == 6 and queue.read().waiting == names


def test_a_run_that_could_not_be_started_is_told_however_fast_it_was(three: tuple[Queue, list[str]]) -> None:
    queue, names = three
    worker = subprocess.Popen(["true"])
    for name in names[:2]:
        queue.take_next(myself())
        with EventWriter(queue.run(name)) as writer:
            writer.write("run_finished", status="failed", exit_code=5, result=None, error="no such file")
    worker.wait()
    move_to_trash(queue.run(names[2]))
    assert queue.take_next(myself()) is None
    told = [text for text, code in queue_worker.follow_queue(queue, worker.pid, names) if code == 5]
    assert told == [f"{name}: failed at step 0: no such file" for name in names[:2]]


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_a_worker_that_was_killed_is_told_and_one_that_was_stopped_is_not(
    three: tuple[Queue, list[str]], killed: bool
) -> None:
    queue, names = three
    worker = subprocess.Popen(["sleep", "60"])
    identity = identify(worker.pid)
    assert identity is not None
    queue.register_worker(identity)
    if not killed:
        queue.clear_worker()
    worker.kill()
    worker.wait()
    told = list(queue_worker.follow_queue(queue, worker.pid, names))
    assert [code for _, code in told] == ([1] if killed else [])
    assert all(f"process {worker.pid}" in text and "tunedeck queue start" in text for text, _ in told)


def test_a_queue_whose_folder_is_being_removed_is_not_taken_for_an_empty_one(three: tuple[Queue, list[str]]) -> None:
    """`rm -r` may remove the order first, and the runs and their folder after it."""
    queue, names = three
    (queue.folder / "order.json").unlink()
    with pytest.raises(EnvironmentProblem, match=r"the runs folder .* was removed"):
        list(queue_worker.follow_queue(Queue.held(queue.runs_dir), os.getpid(), names))


def test_a_run_whose_engine_is_gone_without_a_word_is_no_running_one(three: tuple[Queue, list[str]]) -> None:
    """Its engine could not open a file of the run; the others were removed from the queue, or started by hand."""
    queue, names = three
    worker = subprocess.Popen(["true"])
    queue.take_next(myself())
    queue.run(names[0]).log.write_text("tunedeck: engine.lock cannot be written: Read-only file system\n")
    queue.run(names[2]).log.write_text("")
    worker.wait()
    for name in names[1:]:
        queue.remove(name)
    with claim(queue.run(names[2])):
        assert queue.take_next(myself()) is None
        started, (text, code) = queue_worker.follow_queue(queue, worker.pid, names)
    assert started[0].startswith(f"{names[0]} starts") and code == 1
    assert text.startswith(f"{names[0]}: its engine ended") and f"tunedeck log {names[0]}" in text


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_every_file_has_the_rights_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        run = waiting_run(tmp_path, "a")
        Queue(tmp_path).add(run)
        with claim(run), EventWriter(run):
            send_request(run, "checkpoint")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
        path.name: oct(0o666 & ~umask) for path in files
    }


def test_discarded_runs_lie_in_the_trash_side_by_side(tmp_path: Path) -> None:
    run = waiting_run(tmp_path, "a")
    place = move_to_trash(run)
    assert RunDirectory(place).exists() and not run.exists()
    run.path.mkdir()
    run.run_toml.write_text("", "utf-8")
    assert move_to_trash(run).name == f"{run.name}-2"
    assert RunDirectory(place).exists()
