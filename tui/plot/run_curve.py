"""A metric of a run over steps, tokens and training time. Reads the journal in short slices; draws nothing.

Try: `curve = RunCurve(resolve_run("last", None)); curve.read_more(seconds=1.0); curve.over("tokens")`
"""

from __future__ import annotations

import re
import time
from typing import cast

from engine.journal.directory import RunDirectory
from engine.journal.events import Event, EventTail, decode_event
from engine.journal.summary import KIND_WITHIN_BYTES, STEP_MARK
from tui.plot.metrics import LOSS, Metric
from tui.plot.series import BoundedSeries

AXES = ("steps", "tokens", "time")
"""The axes a curve can be drawn over. Time is the time spent in steps, so pauses do not count."""


STEP = re.compile(
    rb'"kind":"step",.*?"step":(\d+),"epoch":[^,]*,"loss":([^,]+),.*?"tokens":(\d+),.*?"step_seconds":([\d.e+-]+)'
)
"""Step, loss, tokens and seconds in a step's line as the engine writes it. Any other line is parsed as JSON."""

NOTHING: tuple[bytes, ...] = (b"",) * 4

LINES_BETWEEN_CLOCKS = 256
"""Lines read before the clock is asked again: about a millisecond."""


class RunCurve:
    """The values of one metric of a run, over each of AXES (steps, tokens, time). `read_error` says why the run cannot
    be read; empty if it can."""

    def __init__(self, directory: RunDirectory, metric: Metric = LOSS) -> None:
        self.directory, self.metric = directory, metric
        self.read_error = ""
        self.version = 0
        """Incremented whenever something was read."""
        self._tail = EventTail(directory.events)
        self._series = {axis: BoundedSeries() for axis in AXES}
        self._tokens = self._seconds = 0.0
        self._values: list[float | None] = []
        self._place = (0.0, 0.0, 0.0)
        """(steps, tokens, seconds) of the latest step."""
        self._field = re.compile(rb'"%s":([^,}]+)' % metric.field.encode())
        self._places: list[tuple[float, float, float]] = []

    def over(self, axis: str) -> BoundedSeries:
        """Return the metric over `axis`, one of AXES. Tokens and seconds are counted from the start of the run."""
        return self._series[axis]

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
            self.read_error = "" if self.directory.exists() else "its folder is gone"
        except OSError as error:
            self.read_error = f"cannot be read: {error.strerror or error}"
        self._flush()
        self.version += count > 0
        return count > 0 or self.read_error != before

    def _read_event(self, event: Event) -> None:
        if event["kind"] == "resumed":
            self._flush()
            self._cut_after(float(event.get("step") or 0))
        elif event["kind"] == "step":
            figures = [event.get(name) for name in ("step", "tokens", "step_seconds")]
            if all(isinstance(figure, int | float) for figure in figures):  # an incomplete step is left out
                step, tokens, seconds = map(float, cast("list[float]", figures))
                self._step(step, self.metric.value_in(event), tokens, seconds)
        elif event["kind"] == self.metric.kind:
            self._add(self.metric.value_in(event))

    def _step(self, step: float, value: float | None, tokens: float, seconds: float) -> None:
        self._tokens += tokens
        self._seconds += seconds
        self._place = (step, self._tokens, self._seconds)
        if self.metric.kind == "step":
            self._add(value)

    def _add(self, value: float | None) -> None:
        self._values.append(value)
        self._places.append(self._place)

    def _flush(self) -> None:
        """Add the collected steps to the series. Adding many at once is much faster than adding each alone."""
        if self._places:
            for axis, places in zip(AXES, zip(*self._places, strict=True), strict=True):
                self._series[axis].extend(places, self._values)
            self._places, self._values = [], []

    def _cut_after(self, step: float) -> None:
        """Remove the steps after `step` from the series of all axes; a resumed run repeats these steps.

        Only whole buckets can be removed, so a few earlier steps are lost, too; in a long run these are less than a dot
        of the plot.
        """
        steps, tokens, seconds = (self._series[axis] for axis in AXES)
        steps.cut_after(step)
        tokens.keep(len(steps))
        seconds.keep(len(steps))
        self._tokens, self._seconds = tokens.end, seconds.end
        self._place = (steps.end, self._tokens, self._seconds)

    def _match_step(self, line: bytes) -> tuple[float, float | None, float, float] | None:
        """Step, value, tokens and seconds from the journal line of a step; None for a line that STEP does not match."""
        at = line.find(STEP_MARK, 0, KIND_WITHIN_BYTES)
        found = STEP.match(line, at) if at >= 0 else None
        try:
            step, value, tokens, seconds = found.groups() if found is not None else NOTHING
            if self.metric is not LOSS:
                other = self._field.search(line, at) if self.metric.kind == "step" else None
                value = other[1] if other is not None else b"null"
            number = None if value == b"null" else float(value) / self.metric.unit_size
            return float(step), number, float(tokens), float(seconds)
        except ValueError:
            return None
