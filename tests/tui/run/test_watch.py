"""RunWatch: reading in short slices, a resumed run, and damaged run directories."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, encode_event
from engine.journal.summary import SUSPENDED
from tests.journal.event_fields import backoff_fields, junk_lines, step_fields
from tests.journal.run_directories import new_run
from tests.present import present
from tui.plot.metrics import METRICS, metric_beside
from tui.plot.run_curve import RunCurve
from tui.run.gpus import gpu_lines
from tui.run.memory import run_bars
from tui.run.panels import headline_lines
from tui.run.ranks import rank_lines
from tui.run.watch import RunWatch


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path)


def started(run: RunDirectory, steps: int) -> None:
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={}, device_name="a device")
        writer.write("stage_started", max_steps=100)
        for step in range(1, steps + 1):
            writer.write("step", **step_fields(step))


def looked(run: RunDirectory) -> RunWatch:
    watch = RunWatch(run)
    watch.read_more(seconds=10.0)
    return watch


def test_only_what_was_added_is_read(run: RunDirectory) -> None:
    started(run, 3)
    watch = looked(run)
    assert not watch.read_more(seconds=1.0)
    with EventWriter(run) as writer:
        writer.write("step", **step_fields(4))
    assert watch.read_more(seconds=1.0)
    assert (watch.step, watch.curves.loss.points) == (4, 4)


def test_what_was_seen_at_the_first_look_is_not_shown_again_when_more_is_written(run: RunDirectory) -> None:
    """Regression: the step, the time left and the figures went back to those of the first look whenever the engine had
    written a line that was not read yet."""
    started(run, 400)
    watch = looked(run)
    assert watch.step == 400 and not watch.unread_share
    with EventWriter(run) as writer:
        writer.write("step", **step_fields(401))
        watch.read_more(seconds=1.0)
        writer.write("step", **step_fields(402))
    assert watch.unread_share and watch.step == 401


def test_a_long_history_shows_its_present_at_the_first_look_and_its_past_later(run: RunDirectory) -> None:
    with run.events.open("wb") as file:
        head = {"seq": 1, "time": "2026-01-01T00:00:00Z", "stage": "", "rank": 0}
        file.writelines(encode_event({**head, "kind": "step", **step_fields(step)}) for step in range(1, 50_001))
    watch = RunWatch(run)
    watch.read_more(seconds=0.0)
    assert watch.step == 50_000
    assert 0 < watch.curves.loss.points < 50_000
    while watch.unread_share:
        watch.read_more(seconds=0.05)
    assert watch.curves.loss.points == 50_000
    assert len(watch.curves.recent) == 50


def test_a_step_written_in_another_order_of_fields_counts_as_well(run: RunDirectory) -> None:
    event = {"kind": "step", "seq": 1, "time": "2026-01-01T00:00:00Z", **dict(reversed(step_fields(7).items()))}
    run.events.write_text(json.dumps(event) + "\n")
    watch = looked(run)
    assert (watch.step, watch.curves.loss.end) == (7, 7.0)


def test_a_resume_voids_the_steps_after_it(run: RunDirectory) -> None:
    started(run, 20)
    with EventWriter(run) as writer:
        writer.write("resumed", step=10, **{"from": "checkpoints/step-00000010"})
        writer.write("step", **step_fields(11, loss=9.0))
    watch = looked(run)
    assert (watch.step, watch.curves.loss.points) == (11, 11)


def test_a_torn_line_waits_and_a_damaged_one_is_left_out(run: RunDirectory) -> None:
    started(run, 2)
    with run.events.open("ab") as file:
        file.write(b'\x00\x00\x00\n{"seq":9,"time":"","kind":"step","step":3,"epo')
    watch = looked(run)
    assert watch.step == 2
    assert watch.summary is not None
    assert watch.summary.damaged_lines == 1


def test_steps_that_are_no_numbers_are_damaged_lines(run: RunDirectory) -> None:
    run.events.write_bytes(b'{"seq":1,"time":"","kind":"step","step":"many","loss":{}}\n{"kind":7}\n')
    assert looked(run).step == 0


def test_no_field_of_an_event_ends_the_console(run: RunDirectory) -> None:
    run.events.write_bytes(b"".join(junk_lines(2000)))
    watch = looked(run)
    assert watch.summary is not None and watch.summary.damaged_lines > 500
    curve = RunCurve(run, *METRICS)
    while curve.read_more(seconds=1.0):
        pass
    assert rank_lines(watch, 120, 10, str) == [] and run_bars(watch.summary, watch.latest) is not None
    assert len(gpu_lines(watch.gpus, 120, 8, str, ascii_only=False)) <= 8


def test_a_folder_that_vanishes_is_said_and_what_was_known_stays(run: RunDirectory) -> None:
    started(run, 5)
    watch = looked(run)
    shutil.rmtree(run.path)
    assert watch.read_more(seconds=1.0)
    assert "was removed" in watch.read_error
    assert watch.step == 5
    assert watch.summary is not None


def test_every_backoff_explains_itself_in_the_feed(run: RunDirectory) -> None:
    started(run, 1)
    with EventWriter(run) as writer:
        writer.write("backoff", **backoff_fields(2, sequences_before=64, sequences_after=25))
    text = looked(run).feed[-1].text
    assert "out of memory in backward" in text
    assert "redone with at most 25 sequences at a time; no sample lost" in text


def test_the_latest_reading_of_each_device_is_kept(run: RunDirectory) -> None:
    started(run, 1)
    with EventWriter(run) as writer:
        for index, used in ((0, 1), (1, 2), (0, 3)):
            reading = {"utilisation_percent": 1, "temperature_celsius": 2, "power_watts": 3}
            writer.write("gpu", index=index, used_bytes=used, **reading)
    assert {index: event["used_bytes"] for index, event in looked(run).gpu_readings.items()} == {0: 3, 1: 2}


def test_each_stage_of_a_staged_run_has_a_curve_of_its_own(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        for number, name in enumerate(("one", "two"), 1):
            writer.write("stage_started", name=name, number=number, of=2, path=f"stages/0{number}-{name}")
            for step in range(1, 4):
                event = {"seq": step, "kind": "step", "time": "2026-01-01T00:00:00Z", "rank": 0, **step_fields(step)}
                writer.copy(event, name)
            writer.write("stage_finished", name=name, status="done", exit_code=0, steps=3)
    watch = looked(run)
    assert (watch.step, len(watch.curves.recent)) == (3, 3)
    assert [(row["name"], row["status"]) for row in present(watch.summary).stages] == [("one", "done"), ("two", "done")]


def test_a_long_history_says_how_the_run_ended_at_the_first_look(run: RunDirectory) -> None:
    with run.events.open("wb") as file:
        head = {"seq": 1, "time": "2026-01-01T00:00:00Z", "stage": "", "rank": 0}
        file.write(encode_event({**head, "kind": "run_started", "run": "", "pid": 1, "world_size": 1, "versions": {}}))
        file.writelines(encode_event({**head, "kind": "step", **step_fields(step)}) for step in range(1, 50_001))
        end = {"status": "stopped", "exit_code": 130, "result": None}
        file.write(encode_event({**head, "kind": "run_finished", **end}))
    os.utime(run.events, (0, 0))
    watch = RunWatch(run)
    watch.read_more(seconds=0.0)
    assert watch.unread_share > 0.5
    assert present(watch.summary).status == "stopped"


def test_memory_of_a_small_device_is_plotted_in_mib() -> None:
    peak = next(metric for metric in METRICS if metric.field == "peak_bytes")
    assert peak.for_capacity(64 << 20).label == "peak memory, MiB"
    assert peak.for_capacity(64 << 20).value_in({"kind": "step", "peak_bytes": 62 << 20}) == 62
    assert peak.for_capacity(80 << 30) == peak.for_capacity(0) == peak
    assert metric_beside(peak.for_capacity(64 << 20), -1).label == "tokens/s"


def test_a_suspended_engine_says_what_lets_it_go_on(run: RunDirectory) -> None:
    started(run, 3)
    watch = looked(run)
    watch.summary = replace(present(watch.summary), status="running", phase=SUSPENDED)
    assert "kill -CONT" in headline_lines(watch, 80, str, ascii_only=False)[1].plain
