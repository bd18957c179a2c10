"""Loss curves of several runs over one axis: steps, tokens or training time. Reads a little at a time; draws nothing.

Try: `curve = Curve(resolve_run("last", None)); curve.look(seconds=1.0); curve.over("tokens")`
"""

from __future__ import annotations

import time
from array import array

from engine.journal.directory import RunDirectory
from engine.journal.events import Event, EventTail, decode
from tui.series import Series

AXES = ("steps", "tokens", "time")
"""What a curve may be drawn over; time is that spent in steps, so that pauses do not count."""


class Curve:
    """One run's loss, followed. `trouble` says why it cannot be read."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.trouble = ""
        self._tail = EventTail(directory.events)
        self._series = {axis: Series() for axis in AXES}
        self._steps, self._tokens, self._seconds = array("d"), array("d"), array("d")

    def over(self, axis: str) -> Series:
        """The loss over one of AXES; tokens and seconds add up from the start of the run."""
        return self._series[axis]

    def look(self, *, seconds: float) -> bool:
        """Read what was added, for about this long. True when there was anything."""
        deadline = time.monotonic() + seconds
        read = False
        try:
            for line in self._tail.lines():
                event = decode(line)
                if event is not None:
                    self._take(event)
                read = True
                if time.monotonic() > deadline:
                    break
            self.trouble = ""
        except OSError as error:
            self.trouble = f"cannot be read: {error.strerror or error}"
        return read

    def _take(self, event: Event) -> None:
        if event["kind"] == "step":
            self._step(event)
        elif event["kind"] == "resumed":
            self._cut_after(float(event.get("step") or 0))

    def _step(self, event: Event) -> None:
        """Take in one step; one that lacks its figures is left out."""
        step, tokens, seconds = event.get("step"), event.get("tokens"), event.get("step_seconds")
        if not all(isinstance(value, int | float) for value in (step, tokens, seconds)):
            return
        self._steps.append(step)
        self._tokens.append(tokens + (self._tokens[-1] if self._tokens else 0.0))
        self._seconds.append(seconds + (self._seconds[-1] if self._seconds else 0.0))
        loss = event.get("loss")
        known = loss if isinstance(loss, int | float) else None
        for axis, column in zip(AXES, (self._steps, self._tokens, self._seconds), strict=True):
            self._series[axis].extend([column[-1]], [known])

    def _cut_after(self, step: float) -> None:
        """What came after this step did not happen."""
        while self._steps and self._steps[-1] > step:
            for column in (self._steps, self._tokens, self._seconds):
                column.pop()
        for axis, column in zip(AXES, (self._steps, self._tokens, self._seconds), strict=True):
            self._series[axis].cut_after(column[-1] if column else -1.0)
