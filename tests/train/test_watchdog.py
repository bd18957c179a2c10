"""Work that does not end causes one warning, with the stacks of all threads; work that ends causes none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, Journal
from engine.train.run.run_context import Watchdog
from tests.events import read_events
from tests.train.run_helpers import of_kind


def warnings(place: RunDirectory) -> list[dict[str, Any]]:
    return of_kind(list(read_events(place.events)), "warning")


@pytest.fixture
def place(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def writer(place: RunDirectory) -> Iterator[EventWriter]:
    with EventWriter(place) as writer:
        yield writer


class Clock:
    """A clock that shows the time it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def stand_until_told(place: RunDirectory) -> None:
    deadline = time.monotonic() + 20.0
    while not warnings(place):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stuck_step_is_told_while_it_is_stuck_with_the_stack_it_stands_in(
    place: RunDirectory, writer: EventWriter, capfd: pytest.CaptureFixture[str]
) -> None:
    watchdog = Watchdog(Journal(writer), patience_seconds=0.1)
    with watchdog.watching(), watchdog.over("step", "step 7"):
        stand_until_told(place)
    assert warnings(place)[0]["code"] == "stuck" and "step 7" in warnings(place)[0]["text"]
    assert "stand_until_told" in capfd.readouterr().err


def test_one_step_is_told_of_once_and_the_next_again(place: RunDirectory, writer: EventWriter) -> None:
    clock = Clock()
    watchdog = Watchdog(Journal(writer), 100.0, clock)
    for number, stretches in ((1, (49.0, 2.0, 1.0)), (2, (519.0, 2.0, 1.0))):
        with watchdog.over("step", f"step {number}"):
            for seconds in stretches:
                clock.now += seconds
                watchdog.look()
    assert [warning["text"].split()[1] for warning in warnings(place)] == ["1", "2"]


def test_a_long_step_among_long_steps_is_not_stuck(place: RunDirectory, writer: EventWriter) -> None:
    clock = Clock()
    watchdog = Watchdog(Journal(writer), 100.0, clock)
    for seconds in (40.0, 399.0):
        with watchdog.over("step", "step 1"):
            clock.now += seconds
            watchdog.look()
    assert warnings(place) == []


def test_between_steps_nothing_is_stuck(place: RunDirectory, writer: EventWriter) -> None:
    clock = Clock()
    watchdog = Watchdog(Journal(writer), 100.0, clock)
    with watchdog.over("step", "step 1"):
        clock.now += 1.0
    clock.now += 10_000.0
    watchdog.look()
    assert warnings(place) == []


def test_an_evaluation_that_goes_on_piece_by_piece_is_not_stuck(place: RunDirectory, writer: EventWriter) -> None:
    clock = Clock()
    watchdog = Watchdog(Journal(writer), 100.0, clock)
    with watchdog.over("evaluation", "the evaluation"):
        for _ in range(20):
            clock.now += 49.0
            watchdog.look()
            watchdog.goes_on()
    assert warnings(place) == []


def test_long_steps_are_no_excuse_for_a_checkpoint(place: RunDirectory, writer: EventWriter) -> None:
    clock = Clock()
    watchdog = Watchdog(Journal(writer), 100.0, clock)
    with watchdog.over("step", "step 1"):
        clock.now += 49.0
    with watchdog.over("checkpoint", "the checkpoint of step 1"):
        clock.now += 51.0
        watchdog.look()
    assert [warning["text"].split(" has")[0] for warning in warnings(place)] == ["the checkpoint of step 1"]
