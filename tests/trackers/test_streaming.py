"""What a follower forwards of a journal that it reads event by event."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.extras.trackers import follow
from engine.journal.directory import RunDirectory
from engine.journal.events import EventTail, EventWriter
from engine.journal.forwarding import Record
from tests.hours.sink import Sink
from tests.journal.event_fields import step_fields
from tests.journal.run_directories import new_run


def follower(run: RunDirectory, sink: Sink) -> Any:
    run.trackers.mkdir(exist_ok=True)
    return follow._Follower(run, "sink", Record(), sink, refers=False)


def write(run: RunDirectory, steps: list[int]) -> None:
    """Steps; a negative number is a resume from that step."""
    with EventWriter(run) as writer:
        for step in steps:
            if step < 0:
                writer.write("resumed", **{"step": -step, "from": "f", "path": "p", "schedule": "s"})
            else:
                writer.write("step", **step_fields(step))


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_a_later_resume_does_again_are_sent_once(seed: int, tmp_path: Path) -> None:
    drawn, steps, step = random.Random(seed), [], 0
    for _ in range(60):
        if step > 3 and drawn.random() < 0.2:
            step = drawn.randint(1, step)
            steps.append(-step)
        else:
            step += 1
            steps.append(step)
    run = new_run(tmp_path, "x")
    write(run, steps)
    sink = Sink(most=None)
    follower(run, sink)._forward_new(0)
    wanted = [
        step for place, step in enumerate(steps)
        if step > 0 and not any(later < 0 and -later < step for later in steps[place:])
    ]  # fmt: skip
    assert list(sink.steps) == wanted == list(range(1, step + 1))


def test_a_journal_is_read_event_by_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sink = new_run(tmp_path, "x"), Sink(most=None)
    write(run, list(range(1, 50)))
    monkeypatch.delattr(EventTail, "poll")  # which holds all events at once
    following = follower(run, sink)
    assert following._forward_new(0) == 49
    write(run, [50, 51])
    assert following._forward_new(0) == 2 and list(sink.steps) == list(range(1, 52))
