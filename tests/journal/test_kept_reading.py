"""Long journals are read once: what was read is kept, and the next reader goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engine.config.files.trust import state_folder
from engine.journal import kept_reading, summary
from engine.journal.directory import RunDirectory
from engine.journal.events import EventTail
from engine.journal.kept_reading import find_reading
from engine.journal.summary import SummaryReader, summarise
from tests.fuzz.console import EVENTS, HEAD
from tests.journal.event_fields import step_fields
from tests.journal.run_directories import new_run


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Readings of journals of a kilobyte are kept, in a folder of this test."""
    for module in (kept_reading, summary):
        monkeypatch.setattr(module, "FROM_BYTES", 1000)
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "state"))


def lines(first: int, last: int) -> bytes:
    """Steps with an evaluation every tenth one, and every other kind of event once in a while."""
    events: list[dict[str, Any]] = []
    for step in range(first, last):
        events.append({"kind": "step", **step_fields(step, loss=4 / step)})
        if step % 10 == 0:
            events.append({"kind": "eval", "step": step, "metrics": {"loss": 1 / step}})
        if step % 7 == 0:
            events.append(EVENTS[step // 7 % len(EVENTS)])
    return b"".join(written({"seq": 1, **HEAD, **event}) for event in events)


def written(event: dict[str, Any]) -> bytes:
    """As the writer of events spells it."""
    head = {key: event.pop(key) for key in ("seq", "time", "kind", "stage", "rank")}
    return json.dumps({**head, **event}, separators=(",", ":")).encode() + b"\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = new_run(tmp_path / "runs", "x")
    made.events.write_bytes(lines(1, 60))
    return made


def in_full(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    with monkeypatch.context() as patch:
        patch.setattr(summary, "find_reading", lambda events: None)
        return asdict(summarise(run))


@pytest.mark.parametrize("at", [1, 20, 41, 60, 75, 99])
def test_a_reader_that_goes_on_says_the_same_as_one_that_reads_all(
    at: int, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lines(1, 100)
    run.events.write_bytes(lines(1, at) + b'{"torn')
    summarise(run)
    run.events.write_bytes(whole)
    with run.events.open("r+b") as file:  # the same file, longer
        file.write(whole)
    assert asdict(summarise(run)) == in_full(run, monkeypatch)
    assert asdict(summarise(run)) == in_full(run, monkeypatch)


def test_only_new_lines_are_read(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    summarise(run)
    read: list[bytes] = []
    lines_of = EventTail.lines

    def watched(tail: EventTail) -> Iterator[bytes]:
        for line in lines_of(tail):
            read.append(line)
            yield line

    monkeypatch.setattr(EventTail, "lines", watched)
    more = written({"seq": 1, **HEAD, "kind": "eval", "step": 60, "metrics": {"loss": 0.5}})
    with run.events.open("ab") as file:
        file.write(more)
    assert summarise(run).metrics["loss"] == 0.5
    assert read == [more]


@pytest.mark.parametrize("change", ["beginning", "shorter", "replaced", "other user's", "damaged"])
def test_another_file_is_read_in_full(change: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    summarise(run)
    assert find_reading(run.events) is not None
    (kept,) = (state_folder() / "journals").iterdir()
    data = run.events.read_bytes()
    if change == "beginning":
        run.events.write_bytes(data.replace(b'"loss":4.0', b'"loss":5.0', 1))
    elif change == "shorter":
        run.events.write_bytes(lines(1, 50))
    elif change == "replaced":
        other = run.events.with_name("other")
        other.write_bytes(data)
        other.rename(run.events)
    elif change == "other user's":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        kept.write_bytes(kept.read_bytes().replace(b'"stride": 1', b'"stride": "a"'))
    assert find_reading(run.events) is None
    assert asdict(summarise(run)) == in_full(run, monkeypatch)


def test_a_state_folder_that_cannot_be_written_changes_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file")
    assert asdict(SummaryReader(run).refresh()) == in_full(run, monkeypatch)
