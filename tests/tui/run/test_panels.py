"""The lines of the Run screen's state and figures at every width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.journal.event_fields import step_fields
from tests.tui.recorded_runs import add, make_run
from tui.run.panels import figure_strip, headline_lines
from tui.run.watch import RunWatch


@pytest.fixture
def watch(tmp_path: Path) -> RunWatch:
    """A run at step 100 of 200, with half a second a step."""
    run = make_run(tmp_path, status="queued")
    add(run, lambda writer: writer.write("stage_started", max_steps=200))
    add(run, lambda writer: [writer.write("step", **step_fields(step)) for step in range(1, 101)])
    found = RunWatch(run)
    found.read_more(seconds=9.0)
    assert found.summary is not None
    found.summary = replace(found.summary, status="running")
    return found


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (18, "● running  50 %"),
        (20, "● running  50 %"),
        (32, "● running  50 %  0:50 left"),
        (60, "● running  step 100 of 200  50 %  0:50 left"),
        (80, "● running  (simulated device)  step 100 of 200  50 %  0:50 left  ██████░░"),
    ],
)
def test_the_state_line_keeps_what_matters_most(watch: RunWatch, width: int, line: str) -> None:
    assert headline_lines(watch, width, str, ascii_only=False)[0].plain.strip().startswith(line)


def test_a_long_run_says_when_it_is_ready(watch: RunWatch) -> None:
    watch.state.max_steps = 20_000
    assert watch.summary is not None
    watch.summary = replace(watch.summary, max_steps=20_000)
    assert " left  ready " in headline_lines(watch, 120, str, ascii_only=False)[0].plain


def test_figures_are_one_line_the_most_important_first(watch: RunWatch) -> None:
    (line,) = figure_strip(watch, 60, 1, str, ascii_only=False)
    assert line.plain.startswith(" loss ") and line.cell_length <= 60
    both = figure_strip(watch, 120, 2, str, ascii_only=False)
    text = " ".join(each.plain for each in both)
    assert all(name in text for name in ("tokens/s", "gradient norm", "learning rate", "step time"))
    assert "not known" not in text
