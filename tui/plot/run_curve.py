"""Metrics of a run over steps, tokens and training time. Reads the journal in short slices; draws nothing.

Try: `curve = RunCurve(resolve_run("last", None)); curve.read_more(seconds=1.0); curve.over("tokens")`
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence

from engine.journal.directory import RunDirectory
from engine.journal.events import Event, EventTail, decode_event
from engine.journal.summary import KIND_WITHIN_BYTES, STEP_MARK
from tui.plot.metrics import LOSS, Metric
from tui.plot.series import BoundedSeries

AXES = ("steps", "tokens", "time")
"""The axes a curve can be drawn over. Time is the time spent in steps, so pauses do not count."""


STEP = re.compile(
    rb'"kind":"step",.*?"step":(\d{1,18}),"epoch":[^,]*,"loss":([^,]{1,40}),.*?"tokens":(\d{1,18}),.*?"step_seconds":([\d.e+-]{1,40})'
)
"""Step, loss, tokens and seconds in a step's line as the engine writes it. Any other line is parsed as JSON."""

NOTHING: tuple[bytes, ...] = (b"",) * 4

LINES_BETWEEN_CLOCKS = 256
"""Lines read before the clock is asked again: about a millisecond."""


class RunCurve:
    """The values of one metric of a run, or of several that are read together, over each of AXES (steps, tokens, time).
    `read_error` says why the run cannot be read; empty if it can."""

    def __init__(self, directory: RunDirectory, *metrics: Metric) -> None:
        """`metrics`: the loss if none is named."""
        self.directory, self.metrics = directory, metrics or (LOSS,)
        self.metric = self.metrics[0]
        self.read_error = ""
        self.version = 0
        """Incremented whenever something was read."""
        self._tail = EventTail(directory.events)
        self._series = {metric: {axis: BoundedSeries() for axis in AXES} for metric in self.metrics}
        self._tokens = self._seconds = 0.0
        self._place = (0.0, 0.0, 0.0)
        """(steps, tokens, seconds) of the latest step."""
        self._of_steps = {
            metric: re.compile(rb'"%s":([^,}]+)' % metric.field.encode())
            for metric in self.metrics
            if metric.kind == "step"
        }
        """The metrics that the events of steps have, and where on a step's line they are."""
        self._points: dict[Metric, list[tuple[float, float, float, float | None]]] = {m: [] for m in self.metrics}
        """Steps, tokens, seconds and value of the points that are not in the series yet."""

    def over(self, axis: str, metric: Metric | None = None) -> BoundedSeries:
        """Return a metric (the first one by default) over `axis`, one of AXES. Tokens and seconds are counted from the
        start of the run."""
        return self._series[metric or self.metric][axis]

    def read_more(self, *, seconds: float) -> bool:
        """Read new lines of the journal for about `seconds`; returns whether anything changed."""
        deadline, count, before = time.monotonic() + seconds, 0, self.read_error
        try:
            for count, line in enumerate(self._tail.lines(), 1):
                step = self._match_step(line)
                if step is not None:
                    self._step(*step)
                elif (event := decode_event(line)) is not None:
                    self._read_event(event)
                if count % LINES_BETWEEN_CLOCKS == 0 and time.monotonic() > deadline:
                    break
            self.read_error = "" if self.directory.exists() else "its folder was removed"
        except OSError as error:
            self.read_error = f"cannot be read: {error.strerror or error}"
        self._flush()
        self.version += count > 0
        return count > 0 or self.read_error != before

    def _read_event(self, event: Event) -> None:
        if event["kind"] == "resumed":
            self._flush()
            self._cut_after(float(event["step"]))
        elif event["kind"] == "step":
            step, tokens, seconds = (float(event[name]) for name in ("step", "tokens", "step_seconds"))
            self._step(step, [metric.value_in(event) for metric in self._of_steps], tokens, seconds)
        else:
            for metric in self.metrics:
                if event["kind"] == metric.kind:
                    self._add(metric, metric.value_in(event))

    def _step(self, step: float, values: Sequence[float | None], tokens: float, seconds: float) -> None:
        """Add a step, with a value of each metric that steps have."""
        self._tokens += tokens
        self._seconds += seconds
        self._place = (step, self._tokens, self._seconds)
        for metric, value in zip(self._of_steps, values, strict=True):
            self._add(metric, value)

    def _add(self, metric: Metric, value: float | None) -> None:
        self._points[metric].append((*self._place, value))

    def _flush(self) -> None:
        """Add the collected points to the series. Adding many at once is much faster than adding each alone."""
        for metric, points in self._points.items():
            if points:
                *places, values = zip(*points, strict=True)
                for axis, xs in zip(AXES, places, strict=True):
                    self._series[metric][axis].extend(xs, values)
                self._points[metric] = []

    def _cut_after(self, step: float) -> None:
        """Remove the steps after `step` from the series of all axes; a resumed run repeats these steps.

        Only whole buckets can be removed, so a few earlier steps are lost, too; in a long run these are less than a dot
        of the plot.
        """
        for series in self._series.values():
            steps, tokens, seconds = (series[axis] for axis in AXES)
            steps.cut_after(step)
            tokens.keep(len(steps))
            seconds.keep(len(steps))
        # The metric that was recorded last says where the run is: each step has a loss, few have an evaluation.
        ends = [tuple(series[axis].end for axis in AXES) for series in self._series.values()]
        self._place = max((end[0], end[1], end[2]) for end in ends)
        _, self._tokens, self._seconds = self._place

    def _match_step(self, line: bytes) -> tuple[float, list[float | None], float, float] | None:
        """Step, values, tokens and seconds from the journal line of a step; None for a line that STEP does not
        match."""
        at = line.find(STEP_MARK, 0, KIND_WITHIN_BYTES)
        found = STEP.match(line, at) if at >= 0 else None
        try:
            step, loss, tokens, seconds = found.groups() if found is not None else NOTHING
            values = [
                _value(loss, metric) if metric is LOSS else _value((field.search(line, at) or NOTHING)[1], metric)
                for metric, field in self._of_steps.items()
            ]
            return float(step), values, float(tokens), float(seconds)
        except ValueError:
            return None


def _value(text: bytes, metric: Metric) -> float | None:
    """A value on a journal line, in the unit of the metric's label; None for null and for a missing value. Raises
    ValueError for anything else."""
    if text in (b"null", b""):
        return None
    value = float(text) / metric.unit_size
    if not math.isfinite(value):
        raise ValueError("no number of JSON")
    return value
