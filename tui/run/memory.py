"""The memory pane of the Run screen: the predicted bar above the measured one, on one scale, and their figures.

While a run is running, its engine records what torch has allocated and reserved, but not for what; so the measured bar
shows these three figures, and the components are those of the prediction. At its end the engine records the components
of the peak, too. Functions that use no widgets; only `read_planned_memory` reads a file.

Try: `tunedeck`, Enter on a run; at 80x24 also `tab` until "memory"
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from textual.content import Content

from engine.journal.directory import RunDirectory
from engine.journal.event_text import format_bytes
from engine.journal.summary import RunSummary
from tui.run.watch import RunWatch
from tui.theme import COMPONENTS
from tui.widgets.memory_bar import (
    Look,
    MemoryBar,
    bar_line,
    byte_counts,
    held_bar,
    legend_lines,
    predicted_bar,
    scale_line,
)
from tui.widgets.memory_phases import PlannedMemory, memory_by_phase, planned_memory
from tui.widgets.memory_words import moves_sentence, peak_sentence

NAME_WIDTH, FIGURE_WIDTH = 18, 12
"""Cells for the name of a component, and for each figure beside it."""

MOST_LEGEND = 2
"""Lines of the legend of one bar."""

OF_PROCESS = "measured for the whole process; not comparable with the plan, which counts only tensors"
"""On a plain CPU."""

MIN_SHOWN_BYTES = 2**19
"""A smaller component would be shown as 0 MiB."""


def memory_lines(watch: RunWatch, width: int, look: Look) -> list[Content]:
    """The memory pane of a run as lines of `width` cells: scale and bars, then figures, and words about the peak."""
    summary = watch.summary
    if summary is None:
        return []
    width, bars = width - 1, run_bars(summary, watch.latest)
    lines = [*_pictures(summary, bars, width, look)] if bars else [*_peaks(summary)]
    if summary.on_plain_cpu:
        lines += [line for bar in bars for line in legend_lines(bar, width, MOST_LEGEND, look)]
        lines += Content.styled(OF_PROCESS, "$muted").wrap(max(10, width))
        return [Content.assemble(" ", line) for line in lines]
    lines += _figures(summary, bars, width, look)
    plan = plan_in_force(summary)
    components = byte_counts(plan.get("components"))
    phase = str(plan.get("deciding_phase") or "")
    words = [peak_sentence(phase, components) if phase else "", moves_sentence(phase, components)]
    lines += [line for text in words for line in Content.styled(text, "$muted").wrap(max(10, width)) if text]
    return [Content.assemble(" ", line) for line in lines]


def run_bars(summary: RunSummary, step: Mapping[str, Any] | None) -> list[MemoryBar]:
    """The bars of a run, on a plain CPU the measured one alone: what was predicted for what runs (at its end, for the
    step with the peak; before the probe, for the run as it is written), and what was measured up to its latest `step`.
    Empty if the device's memory is unknown."""
    planned, plan = summary.predicted, plan_in_force(summary)
    capacity = planned.get("capacity_bytes")
    if not isinstance(capacity, int):
        return []
    if summary.on_plain_cpu:
        return list(_measured({**summary.measured, "components": {}}, step or {}, capacity))
    label = "predicted" if planned.get("verdict") == "fits" or plan is not planned else "as written"
    bar = predicted_bar(label, byte_counts(plan.get("components")), capacity)
    return [*([bar] if bar.parts else []), *_measured(summary.measured, step or {}, capacity)]


def plan_in_force(summary: RunSummary) -> Mapping[str, Any]:
    """What is predicted for what runs: at the end of the run for the step with the peak, before the probe for the run
    as it is written."""
    found: Mapping[str, Any] = summary.measured.get("predicted") or summary.in_force or summary.predicted
    return found if found.get("components") else summary.predicted


def memory_in_force(directory: RunDirectory, stage: str, summary: RunSummary | None) -> PlannedMemory | None:
    """What is predicted for the micro-batches that run, by phase; before they are known, or in a run of a version that
    did not record it, `read_planned_memory`."""
    runs = summary.in_force if summary is not None else {}
    try:
        settings = f"current: up to {runs['micro_batch']:,} sequences of {runs['length']:,} tokens at a time"
        return memory_by_phase(directory.name, f"{settings} ({runs['reason']})", runs, int(runs["capacity_bytes"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return read_planned_memory(directory, stage)


def read_planned_memory(directory: RunDirectory, stage: str) -> PlannedMemory | None:
    """What was predicted for a run when it was created, or for the stage `stage` of a staged run, by phase; None if its
    `plan.json` has no phases."""
    try:
        plan = json.loads(directory.plan_json.read_text("utf-8"))
        stages = {found["name"]: found["plan"] for found in plan.get("stages", ())}
        return planned_memory(directory.name, stages.get(stage) or plan)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no plan, or not in the format of this version's plans


def _measured(measured: Mapping[str, Any], step: Mapping[str, Any], capacity: int) -> Iterator[MemoryBar]:
    """Yield the measured bar, if anything was measured."""
    if components := byte_counts(measured.get("components")):
        yield predicted_bar("measured", components, capacity)
    elif isinstance(peak := measured.get("peak_bytes"), int):
        held, reserved = (int(step.get(key) or 0) for key in ("allocated_bytes", "reserved_bytes"))
        yield held_bar("measured", held, peak, reserved, capacity)


def _pictures(summary: RunSummary, bars: Sequence[MemoryBar], width: int, look: Look) -> Iterator[Content]:
    """Yield the scale and the bars."""
    yield scale_line(bars[0].capacity_bytes, width, "simulated" if summary.simulated else "")
    yield from (bar_line(bar, width, look) for bar in bars)


def _peaks(summary: RunSummary) -> Iterator[Content]:
    """Yield the peaks as figures, for a run whose device's memory is unknown."""
    predicted = {} if summary.on_plain_cpu else summary.predicted
    for name, figures in (("predicted peak", predicted), ("measured peak", summary.measured)):
        if figures.get("peak_bytes") is not None:
            yield Content(f"{name:<{NAME_WIDTH}}{format_bytes(figures['peak_bytes'])}")


def _figures(summary: RunSummary, bars: Sequence[MemoryBar], width: int, look: Look) -> Iterator[Content]:
    """Yield the legends of a run that has not ended; at the end a table of components, predicted beside measured."""
    measured = byte_counts(summary.measured.get("components"))
    if not measured:
        for bar in bars:
            yield from legend_lines(bar, width, MOST_LEGEND, look)
        return
    predicted = byte_counts(plan_in_force(summary).get("components"))
    head = f"{'at the peak':<{NAME_WIDTH}}{'predicted':>{FIGURE_WIDTH}}{'measured':>{FIGURE_WIDTH}}"
    yield Content.styled(head, "$muted")
    for name in [*COMPONENTS, *(name for name in {**predicted, **measured} if name not in COMPONENTS)]:
        sizes = [column.get(name, 0) for column in (predicted, measured)]
        if max(sizes) >= MIN_SHOWN_BYTES:
            letter, style = COMPONENTS.get(name, (" ", ""))
            texts = "".join(f"{format_bytes(size) if size else '-':>{FIGURE_WIDTH}}" for size in sizes)
            yield Content.assemble((f" {letter} ", style), f" {name:<{NAME_WIDTH - 4}.{NAME_WIDTH - 5}}{texts}")
