"""The event file: what a line is, and what a crash, a full disk or a second thread can do to it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from engine.journal.event_schema import EVENT_KINDS
from engine.journal.events import EventTail, EventWriter, end_of_events, heartbeats
from tests.events import read_events
from tests.journal.event_fields import backoff_fields, step_fields


def test_every_line_has_the_common_fields_and_seq_counts_from_one(run: RunDirectory) -> None:
    with EventWriter(run, stage="01-sft") as writer:
        writer.write("heartbeat")
        writer.write("step", **step_fields(1))
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [line["seq"] for line in lines] == [1, 2]
    assert all(line["stage"] == "01-sft" and line["rank"] == 0 and line["time"].endswith("Z") for line in lines)


@pytest.mark.parametrize("kind", sorted(EVENT_KINDS))
def test_a_kind_without_a_required_field_is_refused(run: RunDirectory, kind: str) -> None:
    with EventWriter(run) as writer:
        for missing in EVENT_KINDS[kind].required:
            fields = dict.fromkeys(EVENT_KINDS[kind].required.keys() - {missing}, 0)
            with pytest.raises(ValueError, match=missing):
                writer.write(kind, **fields)
        with pytest.raises(ValueError, match="lossy"):
            writer.write(kind, **dict.fromkeys(EVENT_KINDS[kind].required, 0), lossy=1)
    assert run.events.read_bytes() == b""


def test_an_unknown_kind_is_refused(run: RunDirectory) -> None:
    with EventWriter(run) as writer, pytest.raises(ValueError, match="no such event kind"):
        writer.write("stepp")


def test_numbers_that_are_not_finite_become_null(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        writer.write("step", **step_fields(1, loss=float("nan"), grad_norm=float("inf")))
        writer.write("eval", step=1, metrics={"loss": float("-inf"), "parts": [float("nan"), 1.0]})
    step, scores = [json.loads(line, parse_constant=pytest.fail) for line in run.events.read_text().splitlines()]
    assert step["loss"] is None and step["grad_norm"] is None
    assert scores["metrics"] == {"loss": None, "parts": [None, 1.0]}


@pytest.mark.parametrize("text", ["a\nb", "\u2028\u2029\x85", "\x00\x1b[31m", "\ud800", "日本"])
def test_text_from_a_model_never_breaks_a_line(run: RunDirectory, text: str) -> None:
    with EventWriter(run) as writer:
        writer.write("warning", code="x", text=text, fix="")
        writer.write("heartbeat")
    assert run.events.read_bytes().count(b"\n") == 2
    assert len(run.events.read_text("ascii").splitlines()) == 2
    assert next(read_events(run.events))["text"] == text


@pytest.mark.parametrize("torn", [b'{"seq":3,"ki', b"\0" * 50, b'{"seq":3,"kind":"heartbeat"}', b"\xff"])
def test_a_resumed_writer_cuts_a_torn_tail_and_counts_on(run: RunDirectory, torn: bytes) -> None:
    with EventWriter(run) as writer:
        writer.write("heartbeat")
        writer.write("heartbeat")
    whole = run.events.read_bytes()
    run.events.write_bytes(whole + torn)
    assert [event["seq"] for event in read_events(run.events)] == [1, 2]
    with EventWriter(run) as writer:
        writer.write("paused")
    assert run.events.read_bytes().startswith(whole)
    assert [json.loads(line)["seq"] for line in run.events.read_text().splitlines()] == [1, 2, 3]


def test_a_crash_at_every_byte_of_the_last_line_loses_that_line_at_most(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        writer.write("heartbeat")
        start = run.events.stat().st_size
        writer.write("eval", step=1, metrics={"loss": 1.0})
    whole = run.events.read_bytes()
    for end in range(start, len(whole)):
        run.events.write_bytes(whole[:end])
        with EventWriter(run) as writer:
            assert writer.write("paused")["seq"] == 2
        assert [event["kind"] for event in read_events(run.events)] == ["heartbeat", "paused"]


def test_a_damaged_line_in_the_middle_is_left_out_and_counted(run: RunDirectory) -> None:
    with EventWriter(run) as writer:
        writer.write("heartbeat")
    run.events.write_bytes(run.events.read_bytes() + b"\0\0\0\n[1]\n")
    with EventWriter(run) as writer:
        writer.write("paused")
    tail = EventTail(run.events)
    assert [(event["seq"], event["kind"]) for event in tail.poll()] == [(1, "heartbeat"), (2, "paused")]
    assert tail.damaged == 2


def test_a_tail_gives_each_event_once_and_waits_for_a_torn_line(run: RunDirectory) -> None:
    tail = EventTail(run.events)
    assert tail.poll() == []
    with EventWriter(run) as writer:
        writer.write("heartbeat")
    line = run.events.read_bytes()
    assert [event["seq"] for event in tail.poll()] == [1]
    for end in range(len(line)):
        run.events.write_bytes(line + line[:end])
        assert tail.poll() == []
    run.events.write_bytes(line + line)
    assert len(tail.poll()) == 1
    assert tail.offset == end_of_events(run.events) == 2 * len(line)


def test_end_of_events_is_after_the_last_complete_line(run: RunDirectory) -> None:
    assert end_of_events(run.events) == 0
    run.events.write_bytes(b"x" * 3_000_000)
    assert end_of_events(run.events) == 0
    run.events.write_bytes(b"a\n" + b"x" * 3_000_000)
    assert end_of_events(run.events) == 2


def test_threads_do_not_mix_lines_or_numbers(run: RunDirectory) -> None:
    with EventWriter(run) as writer:

        def work() -> None:
            for _ in range(200):
                writer.write("warning", code="c", text="x" * 500, fix="")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [event["seq"] for event in read_events(run.events)] == list(range(1, 801))


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = EventWriter(RunDirectory(Path(sys.argv[1])))
writer.write("heartbeat")
resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.RLIM_INFINITY))
try:
    writer.write("warning", code="c", text="x" * 500, fix="")
except OSError as error:
    print("refused", error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write("paused")
"""


def test_a_full_disk_is_reported_and_leaves_no_half_line(run: RunDirectory) -> None:
    """A limit on the file's size replaces a full disk: the kernel writes the bytes that fit, then refuses."""
    script = FULL_DISK.format(root=str(Path(__file__).resolve().parents[2]))
    done = subprocess.run([sys.executable, "-c", script, str(run.path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused")
    assert [(event["seq"], event["kind"]) for event in read_events(run.events)] == [(1, "heartbeat"), (2, "paused")]


def test_the_heart_beats_in_silence_and_only_then(run: RunDirectory) -> None:
    beaten = threading.Event()
    with EventWriter(run) as writer, heartbeats(writer, every_seconds=0.02):
        tail = EventTail(run.events)
        while not any(event["kind"] == "heartbeat" for event in tail.poll()):
            beaten.wait(0.005)
    with EventWriter(run) as writer:
        writer.write("backoff", **backoff_fields(1))
        assert writer.write_if_quiet(60.0, "heartbeat") is None
        assert writer.write_if_quiet(0.0, "heartbeat") is not None


def test_a_full_disk_does_not_end_the_heart(run: RunDirectory) -> None:
    writer = EventWriter(run)
    with heartbeats(writer, every_seconds=0.01):
        writer.close()
        threading.Event().wait(0.05)
        alive = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
        assert len(alive) == 1
