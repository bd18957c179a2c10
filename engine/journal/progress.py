"""The progress of a run as text, computed from its events: the status block of `train` and `watch`. Pure.

`engine.commands.reporter` prints the text.

Try: `tunedeck watch last`
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.journal.event_text import clean, describe_phase, format_bytes, format_duration, format_number, format_share
from engine.journal.events import Event
from engine.journal.journal_state import JournalState

ETA_STEPS = 50
"""The time left is estimated from this many steps: enough to be steady, few enough to follow a backoff."""


@dataclass
class Progress:
    """Takes the events of a run, and describes the run's progress in lines of text."""

    title: str
    simulated: bool
    state: JournalState = field(default_factory=JournalState)
    activity: str = "starting"
    capacity_bytes: int | None = None
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=ETA_STEPS))

    def take(self, event: Event) -> None:
        """Update the progress with one event."""
        self.state.fold(event)
        kind = event["kind"]
        if kind in ("run_started", "plan"):
            self.capacity_bytes = event.get("capacity_bytes") or self.capacity_bytes
        if kind == "phase":
            self.activity = describe_phase(event)
        elif kind == "step":
            self.activity = "training"
            self._step_seconds.append(float(event.get("step_seconds") or 0.0))
        elif kind == "run_finished":
            self.activity = clean(event["status"])

    def lines(self) -> list[str]:
        """The status block: one line before the first step, two afterwards."""
        head = f"{self.title}: {self.activity}"
        step = self.state.last_step
        if step is None:
            return [head]
        return [f"{head}, {self._position()}", f"  {self._figures(step)}"]

    def line(self) -> str:
        """The status of the run as one line of text."""
        step = self.state.last_step
        return self.lines()[0] if step is None else f"{self._position()}, {self._figures(step)}"

    def _position(self) -> str:
        total = self.state.max_steps
        done = f"step {self.state.step:,}" + (f" of {total:,}" if total else "")
        left = self.seconds_left()
        return done + (f", {format_duration(left)} left" if left is not None else "")

    def _figures(self, step: Event) -> str:
        peak = step.get("peak_bytes")
        memory = format_share(peak, self.capacity_bytes) if self.capacity_bytes and peak else format_bytes(peak)
        return (
            f"loss {format_number(step.get('loss'))}, {step.get('tokens_per_second') or 0:,.0f} tokens/s, "
            f"memory {memory}{' (simulated device)' if self.simulated else ''}"
        )

    def seconds_left(self) -> float | None:
        """Estimate the seconds left from the mean of recent steps; None if the total number of steps is not known,
        or no step was taken."""
        if not self.state.max_steps or not self._step_seconds:
            return None
        mean = sum(self._step_seconds) / len(self._step_seconds)
        return mean * max(0, self.state.max_steps - self.state.step)
