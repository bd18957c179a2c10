"""The memory pane of a run that has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from engine.journal.summary import summarise
from tests.tui.recorded_runs import make_run
from tui.run.memory import memory_lines
from tui.run.watch import RunWatch
from tui.widgets.memory_bar import Look


def test_the_words_are_about_what_ran_and_not_about_the_run_as_written(tmp_path: Path) -> None:
    """Regression: beside figures of what ran stood the share of the largest part as written."""
    summary = summarise(make_run(tmp_path))
    ran: dict[str, Any] = {"components": {"weights": 30 << 20, "optimizer": 6 << 20, "activations": 10 << 20}}
    ended = replace(
        summary,
        predicted={**summary.predicted, "deciding_phase": "layer_first", "capacity_bytes": 64 << 20},
        measured={**summary.measured, "predicted": ran},
    )
    watch = cast(RunWatch, SimpleNamespace(summary=ended, latest=None))
    words = " ".join(line.plain.strip() for line in memory_lines(watch, 100, Look()))
    assert "largest part: weights, 65 %" in words and "what lowers weights" in words


def test_on_a_plain_cpu_no_plan_of_tensors_stands_beside_the_memory_of_the_process(tmp_path: Path) -> None:
    summary = summarise(make_run(tmp_path))
    parts = {"weights": 10 << 20, "activations": 5 << 20}
    predicted = {"peak_bytes": 15 << 20, "capacity_bytes": 640 << 20, "components": parts, "verdict": "fits"}
    measured = {"peak_bytes": 140 << 20, "components": {"weights": 10 << 20, "activations": 130 << 20}}
    ended = replace(summary, on_plain_cpu=True, predicted=predicted, measured=measured)
    watch = cast(RunWatch, SimpleNamespace(summary=ended, latest=None))
    words = " ".join(line.plain.strip() for line in memory_lines(watch, 100, Look()))
    assert "of the whole process" in words and "140" in words
    assert not any(word in words for word in ("predicted", "as written", "activations", "15.0"))
