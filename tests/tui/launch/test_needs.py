"""Disk and time on the Launch screen: what earlier runs tell about the pace, and where nothing is known."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest

from engine.budget.advise.plan_time import PlanTime
from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.journal.directory import create_run_directory
from engine.journal.event_text import ready_at
from engine.journal.events import EventWriter
from tests.journal.event_fields import step_fields
from tests.tui.conftest import Opener
from tui.launch.choice import Choice
from tui.launch.evaluate import evaluate_choice
from tui.launch.needs import UNKNOWN_TIME, Needs, find_pace, needed_disk, needs_line, time_words

DEMO = Choice("demo", "demo")


def spec_of(choice: Choice) -> RunSpec:
    spec = evaluate_choice(choice).spec
    assert spec is not None
    return spec


def earlier_run(runs: Path, spec: RunSpec, steps: int) -> None:
    """A run of `spec` whose steps took half a second each."""
    run = create_run_directory(runs, "before", dump_run_spec(spec), {})
    with EventWriter(run) as writer:
        for step in range(1, steps + 1):
            writer.write("step", **step_fields(step, step_seconds=0.5))


def test_a_like_run_tells_how_long_it_takes_and_no_other_does(runs: Path) -> None:
    spec = spec_of(DEMO)
    assert time_words(spec, find_pace(spec, runs)) == UNKNOWN_TIME
    earlier_run(runs, spec_of(DEMO.with_field("train.batch_size", "128")), 20)
    earlier_run(runs, spec, 1)
    assert find_pace(spec, runs) is None
    earlier_run(runs, spec_of(DEMO.with_field("train.learning_rate", "0.1")), 20)
    text = time_words(spec, find_pace(spec, runs))
    assert re.match(
        r"time: about 2:30 for 300 steps \(ready .*at \d\d:\d\d\), at the measured speed of .*\(500 ms per step\)$",
        text,
    )
    evening = datetime(2026, 11, 25, 21, 30).astimezone()
    assert ready_at(600, evening) == "ready at 21:40"
    assert ready_at(9000, evening) == "ready on Thu 26 Nov at 00:00"


def test_disk_is_named_and_how_much_is_free_where_that_is_too_little() -> None:
    needed = needed_disk(spec_of(DEMO))
    assert needed is not None and needed > 3 << 20
    assert "free" not in needs_line(Needs(5 << 20, 9 << 20, ""), 80).plain
    assert "only 1.0 MiB free" in needs_line(Needs(5 << 20, 1 << 20, ""), 80).plain
    time = "time: about 2:30 for 300 steps predicted, 4,000 tokens/s"
    assert needs_line(Needs(5 << 20, None, time), 79).plain == (
        "disk: up to 5.0 MiB   time: about 2:30 for 300 steps predicted, 4,000 tokens/s"
    ), "at 80 columns the time was left out"
    assert needs_line(Needs(None, None, UNKNOWN_TIME), 60).plain == "disk: unknown   time: unknown"


@pytest.mark.asyncio
async def test_disk_and_time_stand_beside_memory_and_a_change_says_what_was(console: Opener) -> None:
    async with console(120, 36, profile="demo", recipe="demo") as pilot:
        await pilot.sees("disk: up to", "time: unknown, no earlier run", "↓")
        pilot.screen.state.set_field("train.batch_size", "128")
        pilot.screen._show()
        await pilot.sees("was 64")
        assert pilot.screen.state.field_rows()[5].note == "was 64"


def test_a_predicted_pace_has_thousands_as_every_other_figure() -> None:
    choice = Choice("24gb", "lora").with_field("train.max_steps", "2000")
    predicted = PlanTime(4.2, 1026.0, 2000 * 4.2 / 3600, None, {}, "profile", 1.0, 0.0, 0)
    text = time_words(spec_of(choice), None, predicted)
    assert text == "time: about 2:20:00 for 2,000 steps predicted, 1,026 tokens/s"
