"""A run's summary: folded from events and liveness, and fast on long files."""

from __future__ import annotations

import os
import platform
import signal
import time

import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.journal.directory import RunDirectory
from engine.journal.events import FINAL_STATUSES, EventWriter, encode_event
from engine.journal.liveness import REMOTE_STALE_SECONDS, STALE_SECONDS, ProcessIdentity, claim, identify, record_engine
from engine.journal.summary import SummaryReader, summarise
from engine.journal.summary_text import result_rows
from tests.events import read_events
from tests.journal.conftest import Spawn
from tests.journal.event_fields import backoff_fields, step_fields
from tests.journal.waiting import until


def start(writer: EventWriter, max_steps: int = 10) -> None:
    writer.write("run_started", run="r", pid=os.getpid(), world_size=1, versions={})
    writer.write("stage_started", max_steps=max_steps)


def age(directory: RunDirectory, seconds: float) -> None:
    for path in (directory.events, directory.engine):
        if path.exists():
            os.utime(path, (time.time() - seconds,) * 2)


def test_a_run_without_an_engine_is_queued_and_knows_its_plan(run: RunDirectory) -> None:
    summary = summarise(run)
    assert (summary.status, summary.step, summary.name, summary.simulated) == ("queued", 0, "demo", True)
    assert summary.predicted == {"peak_bytes": 300 << 20, "capacity_bytes": 256 << 20, "verdict": "fits_smaller"}


def test_progress_scores_and_memory_come_from_the_events(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        start(writer)
        writer.write("eval", step=0, metrics={"loss": 4.0, "exact_match": 0.0})
        writer.write("step", **step_fields(1, peak_bytes=999))
        writer.write("backoff", **backoff_fields(2))
        writer.write("step", **step_fields(2, peak_bytes=500))
        writer.write("eval", step=2, metrics={"loss": 0.5, "exact_match": 0.97})
        writer.write("checkpoint_saved", step=2, path="p", save_seconds=0.1, size_bytes=1)
        writer.write("run_finished", status="done", exit_code=0, result="adapter")
    summary = summarise(run)
    assert (summary.status, summary.step, summary.max_steps, summary.backoffs) == ("done", 2, 10, 1)
    assert summary.metrics == {
        "loss": 0.5, "exact_match": 0.97, "train_loss": 0.5, "tokens_per_second": 1000.0,
        "first": {"loss": 4.0, "exact_match": 0.0, "train_loss": 1.0},
    }  # fmt: skip
    assert (summary.measured, summary.result) == ({"peak_bytes": 999}, "adapter")


def test_resumed_voids_what_came_after_the_step_it_goes_on_from(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        start(writer)
        for step in range(1, 8):
            writer.write("step", **step_fields(step))
            writer.write("backoff", **backoff_fields(step))
            writer.write("eval", step=step, metrics={"loss": float(step)})
        writer.write("resumed", step=3, **{"from": "checkpoints/step-00000003"})
    summary = summarise(run)
    assert (summary.step, summary.backoffs) == (3, 3)
    assert summary.metrics["loss"] == 3.0
    assert "train_loss" not in summary.metrics
    with EventWriter(run) as writer:
        writer.write("step", **step_fields(4))
    assert summarise(run).step == 4


@pytest.mark.parametrize("status", FINAL_STATUSES)
def test_the_engines_last_word_is_the_status(run: RunDirectory, status: str) -> None:
    with EventWriter(run) as writer:
        start(writer)
        writer.write("run_finished", status=status, exit_code=1, result=None)
    assert summarise(run).status == status


def test_a_living_engine_is_running_however_silent(run: RunDirectory) -> None:
    with claim(run), EventWriter(run) as writer:
        start(writer)
        age(run, 10_000)
        assert summarise(run).status == "running"


def test_a_resumed_engine_that_still_loads_is_running(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        start(writer)
        writer.write("run_finished", status="stopped", exit_code=130, result=None)
    with claim(run):
        assert summarise(run).status == "running"
    assert summarise(run).status == "stopped"


def test_stale_needs_a_dead_engine_and_a_silent_heart(run: RunDirectory, spawn: Spawn) -> None:
    child = spawn(run, "ignore")
    until(lambda: summarise(run).step > 0)
    child.send_signal(signal.SIGKILL)
    child.wait()
    age(run, STALE_SECONDS - 5)
    assert summarise(run).status == "running"
    age(run, STALE_SECONDS + 1)
    assert summarise(run).status == "stale"


@pytest.mark.parametrize("hours_ahead", [3.0, 0.5])
def test_a_dead_engines_journal_from_the_future_is_stale(run: RunDirectory, hours_ahead: float) -> None:
    with EventWriter(run) as writer:
        start(writer)
    record_engine(run, ProcessIdentity(os.getpid(), "another boot:1", platform.node()))  # the pid is another process's
    age(run, -3600 * hours_ahead)
    assert summarise(run).status == "stale"


def test_an_engine_that_is_not_seen_lives_while_it_holds_its_lock(run: RunDirectory) -> None:
    """As an engine in another container with the same host name."""
    with EventWriter(run) as writer:
        start(writer)
    with claim(run):
        record_engine(run, ProcessIdentity(2**22 + 1, "another boot:1", platform.node()))
        age(run, 10_000)
        assert summarise(run).status == "running"
    record_engine(run, ProcessIdentity(2**22 + 1, "another boot:1", platform.node()))
    age(run, 10_000)
    assert summarise(run).status == "stale"


def test_a_suspended_engine_is_running_and_said_to_be_stopped(run: RunDirectory, spawn: Spawn) -> None:
    child = spawn(run, "ignore")
    until(lambda: summarise(run).step > 0)
    child.send_signal(signal.SIGSTOP)
    until(lambda: summarise(run).phase == "suspended by a signal")
    age(run, 10_000)
    summary = summarise(run)
    assert (summary.status, dict(result_rows(summary))["status"]) == (
        "running", "running (simulated device): suspended by a signal"
    )  # fmt: skip
    done = CliRunner().invoke(app, ["pause", str(run.path)])
    assert done.exit_code == 0 and f"kill -CONT {child.pid}" in done.stderr
    child.send_signal(signal.SIGCONT)
    until(lambda: summarise(run).phase != "suspended by a signal")


def test_an_engine_on_another_machine_is_judged_by_its_heart_alone(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        start(writer)
    ours = identify(os.getpid())
    assert ours is not None
    record_engine(run, type(ours)(ours.pid, ours.started, "elsewhere"))
    age(run, STALE_SECONDS + 1)
    assert summarise(run).status == "running"
    age(run, REMOTE_STALE_SECONDS + 1)
    assert summarise(run).status == "stale"


def test_a_reader_that_refreshes_says_the_same_as_one_that_begins_anew(run: RunDirectory) -> None:
    reader = SummaryReader(run)
    with EventWriter(run) as writer:
        start(writer)
        for step in range(1, 30):
            writer.write("step", **step_fields(step))
            if step % 5 == 0:
                writer.write("heartbeat")
            if step % 7 == 0:
                writer.write("eval", step=step, metrics={"loss": float(step)})
            if step == 20:
                writer.write("resumed", step=15, **{"from": "x"})
            assert reader.refresh() == summarise(run)


def test_a_long_run_is_summarised_without_parsing_every_line(run: RunDirectory) -> None:
    """The time is compared with that of parsing every event, which takes several times as long."""
    lines = []
    for step in range(1, 100_001):
        common = {"seq": step, "time": "2026-11-20T20:58:00.123Z", "kind": "step", "stage": "", "rank": 0}
        lines.append(encode_event({**common, **step_fields(step)}))
    run.events.write_bytes(b"".join(lines))
    begun = time.process_time()
    summary = summarise(run)
    summarised = time.process_time() - begun
    begun = time.process_time()
    assert sum(1 for _ in read_events(run.events)) == 100_000
    assert summarised < 0.6 * (time.process_time() - begun)
    assert (summary.step, summary.measured["peak_bytes"]) == (100_000, (200 << 20) + 100_000)


def test_read_in_slices_a_long_history_amounts_to_the_same(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        start(writer)
        for step in range(1, 1501):
            writer.write("step", **step_fields(step, peak_bytes=step % 700))
            if step % 400 == 0:
                writer.write("eval", step=step, metrics={"loss": 1 / step})
                writer.write("heartbeat")
        writer.write("resumed", step=1200, **{"from": "checkpoints/step-00001200"})
        writer.write("step", **step_fields(1201))
    reader, slices = SummaryReader(run), 1
    while not reader.read(seconds=0.0):
        slices += 1
    assert slices == 3
    assert reader.summary() == summarise(run)
    assert reader.summary().step == 1201
