"""The memory pane of a run that has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from engine.journal.events import EventWriter
from engine.journal.summary import summarise
from engine.journal.summary_text import detail_rows, result_rows
from tests.journal.event_fields import step_fields
from tests.tui.recorded_runs import COMPONENTS, make_run
from tui.run.memory import memory_in_force, memory_lines
from tui.run.panels import figure_lines
from tui.run.watch import RunWatch
from tui.widgets.memory_bar import Look


def test_the_words_are_about_what_ran_and_not_about_the_run_as_written(tmp_path: Path) -> None:
    """Regression: beside figures of what ran stood the share of the largest part as written."""
    summary = summarise(make_run(tmp_path))
    parts = {"weights": 30 << 20, "optimizer": 6 << 20, "activations": 10 << 20}
    ran: dict[str, Any] = {"components": parts, "deciding_phase": "layer_last"}
    ended = replace(
        summary,
        predicted={**summary.predicted, "deciding_phase": "generate", "capacity_bytes": 64 << 20},
        measured={**summary.measured, "predicted": ran},
    )
    watch = cast(RunWatch, SimpleNamespace(summary=ended, latest=None))
    words = " ".join(line.plain.strip() for line in memory_lines(watch, 100, Look()))
    assert "the peak is in the end of the backward pass; largest part: weights, 65 %" in words
    assert "to lower weights" in words and "generation" not in words


def test_on_a_plain_cpu_no_plan_of_tensors_stands_beside_the_memory_of_the_process(tmp_path: Path) -> None:
    summary = summarise(make_run(tmp_path))
    parts = {"weights": 10 << 20, "activations": 5 << 20}
    predicted = {"peak_bytes": 15 << 20, "capacity_bytes": 640 << 20, "components": parts, "verdict": "fits"}
    measured = {"peak_bytes": 140 << 20, "components": {"weights": 10 << 20, "activations": 130 << 20}}
    ended = replace(summary, on_plain_cpu=True, predicted=predicted, measured=measured)
    watch = cast(RunWatch, SimpleNamespace(summary=ended, latest=None))
    words = " ".join(line.plain.strip() for line in memory_lines(watch, 100, Look()))
    assert "whole process" in words and "140" in words
    assert not any(word in words for word in ("predicted", "as written", "activations", "15.0"))


def test_what_runs_after_a_cut_stands_beside_the_measured(tmp_path: Path) -> None:
    """Regression: after the backoff the bar of the run as written still stood beside the measured one, and its phases
    were those of the run."""
    run = make_run(tmp_path, status="queued")
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={}, device_name="a device")
        writer.write("plan", predicted={"peak_bytes": 129 << 20, "components": COMPONENTS}, verdict="fits_smaller",
                     capacity_bytes=64 << 20)  # fmt: skip
        parts = {"weights": 9 << 20, "activations": 50 << 20, "loss": 0}
        ran = {"peak_bytes": 59 << 20, "components": parts, "deciding_phase": "forward", "phases": {"forward": parts}}
        writer.write("micro_batch", step=0, sequences=25, length=41, reason="memory ran out", predicted=ran)
        writer.write("step", **step_fields(1, peak_bytes=58 << 20, largest_micro_batch=31, micro_batches=3))
    watch = RunWatch(run)
    watch.read_more(seconds=9.0)
    text = "\n".join(line.plain for line in memory_lines(watch, 100, Look()))
    assert "predicted" in text and "59.0 MiB" in text and "58.0 MiB" in text
    assert "as written" not in text and "129" not in text
    planned = memory_in_force(run, "", watch.summary)
    assert planned is not None and "up to 25 sequences of 41 tokens" in planned.settings
    assert planned.phases["forward"]["activations"] == 50 << 20
    listed = [row for row in detail_rows(summarise(run)) if row[0].startswith("  ")]
    assert [name.strip() for name, _ in listed] == ["weights", "activations"], "components of 0 MiB were listed, too"
    figures = "\n".join(line.plain for line in figure_lines(watch, str, ascii_only=False))
    assert "25 at full length; batch 64 in 3" in figures and "31" not in figures
    assert ("peak memory", "58 of 64 MiB, predicted 59 MiB for micro-batch 25") in result_rows(summarise(run))
