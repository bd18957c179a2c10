"""The loss of a run over steps, tokens and training time, for comparing runs. Reads in short slices; draws nothing.

Try: `curve = RunCurve(resolve_run("last", None)); curve.read_more(seconds=1.0); curve.over("tokens")`
"""

from __future__ import annotations

import re
import time
from typing import cast

from engine.journal.directory import RunDirectory
from engine.journal.events import Event, EventTail, decode_event
from engine.journal.summary import KIND_WITHIN_BYTES, STEP_MARK
from tui.plot.series import BoundedSeries

AXES = ("steps", "tokens", "time")
"""The axes a curve can be drawn over. Time is the time spent in steps, so pauses do not count."""


STEP = re.compile(
    rb'"kind":"step",.*?"step":(\d+),"epoch":[^,]*,"loss":([^,]+),.*?"tokens":(\d+),.*?"step_seconds":([\d.e+-]+)'
)
"""Step, loss, tokens and seconds in a step's line as the engine writes it. Any other line is parsed as JSON."""

LINES_BETWEEN_CLOCKS = 256
"""Lines read before the clock is asked again: about a millisecond."""


class RunCurve:
    """The loss of one run, over each of AXES. `read_error` says why the run cannot be read."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.read_error = ""
        self._tail = EventTail(directory.events)
        self._series = {axis: BoundedSeries() for axis in AXES}
        self._tokens = self._seconds = 0.0
        self._losses: list[float | None] = []
        self._places: list[tuple[float, float, float]] = []

    def over(self, axis: str) -> BoundedSeries:
        """The loss over one of AXES. Tokens and seconds are counted from the start of the run."""
        return self._series[axis]

    def read_more(self, *, seconds: float) -> bool:
        """Read new lines of the journal for about `seconds`; returns whether anything changed."""
        deadline, count, before = time.monotonic() + seconds, 0, self.read_error
        try:
            for count, line in enumerate(self._tail.lines(), 1):
                step = _match_step(line)
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
        return count > 0 or self.read_error != before

    def _read_event(self, event: Event) -> None:
        if event["kind"] == "resumed":
            self._flush()
            self._cut_after(float(event.get("step") or 0))
        elif event["kind"] == "step":
            figures = [event.get(name) for name in ("step", "tokens", "step_seconds")]
            if all(isinstance(figure, int | float) for figure in figures):  # an incomplete step is left out
                step, tokens, seconds = map(float, cast("list[float]", figures))
                loss = event.get("loss")
                self._step(step, loss if isinstance(loss, int | float) else None, tokens, seconds)

    def _step(self, step: float, loss: float | None, tokens: float, seconds: float) -> None:
        self._tokens += tokens
        self._seconds += seconds
        self._losses.append(loss)
        self._places.append((step, self._tokens, self._seconds))

    def _flush(self) -> None:
        """Add the collected steps to the series. Adding many at once is much faster than adding each alone."""
        if self._places:
            for axis, places in zip(AXES, zip(*self._places, strict=True), strict=True):
                self._series[axis].extend(places, self._losses)
            self._places, self._losses = [], []

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


def _match_step(line: bytes) -> tuple[float, float | None, float, float] | None:
    """Step, loss, tokens and seconds from the journal line of a step; None for a line that STEP does not match."""
    at = line.find(STEP_MARK, 0, KIND_WITHIN_BYTES)
    found = STEP.match(line, at) if at >= 0 else None
    try:
        step, loss, tokens, seconds = found.groups() if found is not None else (b"", b"", b"", b"")
        return float(step), None if loss == b"null" else float(loss), float(tokens), float(seconds)
    except ValueError:
        return None
