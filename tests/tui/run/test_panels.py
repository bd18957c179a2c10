"""The lines of the Run screen's state and figures at every width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.journal.event_fields import step_fields
from tests.tui.recorded_runs import add, make_run
from tui.run.pane_choice import PaneChoice
from tui.run.panels import figure_strip, headline_lines
from tui.run.scores import sample_lines
from tui.run.watch import RunWatch
from tui.theme import glyphs


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


def test_a_finished_run_names_the_folder_of_its_result(watch: RunWatch) -> None:
    assert watch.summary is not None
    watch.summary = replace(watch.summary, status="done", result="model", reason="")
    line = headline_lines(watch, 200, str, ascii_only=False)[1].plain
    assert line == f" finished; result in {watch.directory.name}/model"


@pytest.mark.parametrize(
    ("to_ascii", "shown"), [(str, "2039 ->␣"), (lambda text: glyphs(text, ascii_only=True), "2039 ->_")]
)
def test_a_space_at_the_end_of_a_prompt_is_seen(watch: RunWatch, to_ascii: Callable[[str], str], shown: str) -> None:
    """Regression: who asked the trained model without it got other answers, and no screen showed it."""
    samples = [{"prompt": "november 17, 2039 -> ", "answer": "x", "reference": "2039-11-17"}]
    add(watch.directory, lambda writer: writer.write("eval", step=100, metrics={"loss": 1.0}, samples=samples))
    watch.read_more(seconds=9.0)
    assert any(line.plain.strip() == f"november 17, {shown}" for line in sample_lines(watch, 80, to_ascii))


@pytest.mark.parametrize(
    ("beside", "active", "hidden"),
    [
        (True, "events", set()),
        (False, "events", {"samples"}),
        (False, "samples", {"memory"}),
    ],
)
def test_answers_are_had_by_tab_where_there_is_no_room_for_all(beside: bool, active: str, hidden: set[str]) -> None:
    """Regression: at 120x36 a finished run showed no answer of its model."""
    choice = PaneChoice(room="all", active=active, has_samples=True, samples_beside=beside)
    assert set(choice.names) - choice.shown == hidden and "samples" in choice.names


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
    assert "unknown" not in text
