"""Following a real engine process: its exit code, the user's signals, and an engine that dies without recording an
end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import EnvironmentProblem, TunedeckError
from engine.journal import control
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.liveness import claim, engine_process, identify, is_alive, record_engine
from engine.journal.summary import summarise
from engine.launch.process import FileOffsets, follow_engine, force_stop, log_tail, start_engine, wait_until_running
from tests.journal.conftest import Spawn
from tests.journal.waiting import PATIENCE_SECONDS, until

FOLLOWER = Path(__file__).with_name("follower.py")

Follow = Callable[[RunDirectory, str], "subprocess.Popen[str]"]


@pytest.fixture
def follower() -> Iterator[Follow]:
    """Starts followers, waits until their engine steps, and leaves neither behind."""
    started: list[tuple[subprocess.Popen[str], RunDirectory]] = []

    def start(directory: RunDirectory, mode: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(FOLLOWER), str(directory.path), mode],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append((process, directory))
        until(lambda: summarise(directory).step > 0)
        return process

    yield start
    for process, directory in started:
        identity = engine_process(directory)
        if identity is not None and is_alive(identity):
            os.kill(identity.pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def engine_of(directory: RunDirectory) -> int:
    identity = engine_process(directory)
    assert identity is not None
    return identity.pid


def test_every_event_is_relayed_and_the_engines_code_returned(run: RunDirectory, spawn: Spawn) -> None:
    seen: list[str] = []
    code = follow_engine(run, spawn(run, "finish"), on_event=lambda event: seen.append(event["kind"]))
    assert code == 0
    assert seen == ["run_started", "stage_started", *["step"] * 5, "run_finished"]


def test_an_engine_that_is_killed_after_it_recorded_its_end_gives_the_recorded_code(
    run: RunDirectory, spawn: Spawn
) -> None:
    assert follow_engine(run, spawn(run, "late"), on_event=lambda event: None) == 0


def test_an_engine_that_failed_gives_its_code(run: RunDirectory, spawn: Spawn) -> None:
    assert follow_engine(run, spawn(run, "fail"), on_event=lambda event: None) == 5
    assert summarise(run).last_error == "nothing to train on"


def test_an_engine_that_vanished_is_an_error_with_the_end_of_its_log(run: RunDirectory, spawn: Spawn) -> None:
    with pytest.raises(TunedeckError) as caught:
        follow_engine(run, spawn(run, "vanish"), on_event=lambda event: None)
    assert caught.value.exit_code == 3
    assert "the last thing it said" in caught.value.render() and "resume" in caught.value.fix


def test_an_engine_that_was_killed_is_137_and_says_so(run: RunDirectory, follower: Follow) -> None:
    process = follower(run, "ignore")
    os.kill(engine_of(run), signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 137
    assert "SIGKILL" in errors and "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_for_a_stop(run: RunDirectory, follower: Follow, number: int) -> None:
    process = follower(run, "obey")
    process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert "stopping after this step" in output and "control" in output
    assert summarise(run).status == "stopped"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_kills(run: RunDirectory, follower: Follow, number: int) -> None:
    process = follower(run, "ignore")
    pid = engine_of(run)
    process.send_signal(number)
    until(lambda: summarise(run).stopping)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 137
    assert identify(pid) is None
    summary = summarise(run)
    assert (summary.status, summary.exit_code) == ("stopped", 137)


def test_hangup_leaves_the_engine_running(run: RunDirectory, follower: Follow) -> None:
    process = follower(run, "ignore")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    step = summarise(run).step
    until(lambda: summarise(run).step > step)
    assert summarise(run).status == "running"


def test_a_closed_stdout_leaves_the_engine_running(run: RunDirectory, follower: Follow) -> None:
    process = follower(run, "ignore")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    process.wait(timeout=PATIENCE_SECONDS)
    step = summarise(run).step
    until(lambda: summarise(run).step > step)


def test_a_killed_follower_leaves_the_engine_running(run: RunDirectory, follower: Follow) -> None:
    process = follower(run, "ignore")
    process.kill()
    process.wait()
    step = summarise(run).step
    until(lambda: summarise(run).step > step)


def test_force_kills_the_engine_and_what_it_started(run: RunDirectory, spawn: Spawn) -> None:
    child = spawn(run, "ignore")
    until(lambda: summarise(run).step > 0)
    force_stop(run)
    assert child.wait(timeout=PATIENCE_SECONDS) == -signal.SIGKILL
    summary = summarise(run)
    assert (summary.status, summary.exit_code, engine_process(run)) == ("stopped", 137, None)


def test_force_spares_a_process_that_only_has_the_engines_pid(run: RunDirectory, spawn: Spawn) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    identity = identify(bystander.pid)
    assert identity is not None
    record_engine(run, type(identity)(identity.pid, identity.started + "0", identity.host))
    force_stop(run)
    assert bystander.poll() is None
    bystander.communicate(b"\n")
    assert summarise(run).status == "stopped"


def test_an_engine_on_another_machine_is_not_killed_from_here(run: RunDirectory) -> None:
    ours = identify(os.getpid())
    assert ours is not None
    record_engine(run, type(ours)(ours.pid, ours.started, "elsewhere"))
    with pytest.raises(EnvironmentProblem, match="elsewhere"):
        force_stop(run)
    assert not run.events.exists()


def test_a_started_engine_has_its_own_session_and_is_on_record(run: RunDirectory) -> None:
    control.send_request(run, "stop")
    process = start_engine(run)
    try:
        assert os.getsid(process.pid) == process.pid
        assert engine_of(run) == process.pid
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        assert arguments[1] == b"-P" and arguments[2].endswith(b"/tunedeck.py") and arguments[3] == b"_engine"
        assert not list(run.control.glob("*.json"))
        assert os.readlink(f"/proc/{process.pid}/fd/0") == "/dev/null"
    finally:
        process.kill()
        process.wait()


def test_two_engines_on_one_run_are_refused(run: RunDirectory) -> None:
    with claim(run), pytest.raises(EnvironmentProblem, match="another engine"):
        start_engine(run)


def test_detaching_waits_for_the_first_event_or_reports_the_death(run: RunDirectory, spawn: Spawn) -> None:
    wait_until_running(run, spawn(run, "ignore"))
    assert summarise(run).status == "running"
    end = run.events.stat().st_size
    gone = subprocess.Popen([sys.executable, "-c", "raise SystemExit(6)"])
    force_stop(run)
    end = run.events.stat().st_size
    with pytest.raises(TunedeckError) as caught:
        wait_until_running(run, gone, start=FileOffsets(events=end))
    assert caught.value.exit_code == 6


def test_the_log_of_an_earlier_attempt_is_not_shown(run: RunDirectory) -> None:
    run.log.write_text("old trouble\n")
    start = run.log.stat().st_size
    with run.log.open("a") as log:
        log.write("new trouble\n" * 40)
    assert log_tail(run, start=start, lines=50) == ["new trouble"] * 40
    assert len(log_tail(run)) == 15


def test_following_a_resumed_run_begins_with_its_news(run: RunDirectory, spawn: Spawn) -> None:
    with EventWriter(run) as writer:
        writer.write("run_finished", status="stopped", exit_code=130, result=None)
    seen: list[str] = []
    start = FileOffsets.of(run)
    follow_engine(run, spawn(run, "finish"), on_event=lambda event: seen.append(event["kind"]), start=start)
    assert seen[0] == "run_started" and seen.count("run_finished") == 1
