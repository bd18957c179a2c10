"""The progress of a run on a terminal or in a pipe, from its events alone.

On a terminal: a status block of at most four lines, redrawn twice a second, with lasting lines above it. Elsewhere: the
lasting lines and one progress line every few seconds, without a control code. rich is imported inside: the command
line's start does not pay for it.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from engine.journal.event_text import (
    clean,
    describe_event,
    describe_phase,
    format_bytes,
    format_duration,
    format_number,
    format_score,
)
from engine.journal.journal_state import JournalState
from engine.journal.summary import RunSummary

if TYPE_CHECKING:
    from rich.console import Console

REDRAW_SECONDS = 0.5
"""Two redraws a second at most: more makes an SSH line crawl."""

PLAIN_SECONDS = 10.0
"""Between progress lines where there is no terminal: readable in a log of hours."""

ETA_STEPS = 50
"""Steps whose mean duration the estimate rests on: long enough to be calm, short enough to follow a backoff."""


class Reporter(Protocol):
    """Shows a run."""

    def event(self, event: dict[str, Any]) -> None:
        """Take in one event."""

    def tick(self) -> None:
        """Redraw if it is time."""

    def notice(self, text: str) -> None:
        """A sentence that does not come from the run."""

    def close(self) -> None:
        """Leave the screen in order."""


@dataclass
class Progress:
    """What the status block says; knows nothing of screens."""

    title: str
    simulated: bool
    state: JournalState = field(default_factory=JournalState)
    doing: str = "starting"
    capacity_bytes: int | None = None
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=ETA_STEPS))

    def take(self, event: dict[str, Any]) -> None:
        """Fold one event in."""
        self.state.fold(event)
        kind = event["kind"]
        if kind in ("run_started", "plan"):
            self.capacity_bytes = event.get("capacity_bytes") or self.capacity_bytes
        if kind == "phase":
            self.doing = describe_phase(event)
        elif kind == "step":
            self.doing = "training"
            self._durations.append(float(event.get("step_seconds") or 0.0))
        elif kind == "run_finished":
            self.doing = clean(event["status"])

    def lines(self) -> list[str]:
        """The status block."""
        head = f"{self.title}: {self.doing}"
        step = self.state.last_step
        if step is None:
            return [head]
        return [f"{head}, {self._where()}", f"  {self._figures(step)}"]

    def line(self) -> str:
        """The same on one line."""
        step = self.state.last_step
        return self.lines()[0] if step is None else f"{self._where()}, {self._figures(step)}"

    def _where(self) -> str:
        total = self.state.max_steps
        done = f"step {self.state.step:,}" + (f" of {total:,}" if total else "")
        left = self.seconds_left()
        return done + (f", {format_duration(left)} left" if left is not None else "")

    def _figures(self, step: dict[str, Any]) -> str:
        held = format_bytes(step.get("peak_bytes"))
        memory = f"{held} of {format_bytes(self.capacity_bytes)}" if self.capacity_bytes else held
        return (
            f"loss {format_number(step.get('loss'))}, {step.get('tokens_per_second') or 0:,.0f} tokens/s, "
            f"memory {memory}{' (simulated device)' if self.simulated else ''}"
        )

    def seconds_left(self) -> float | None:
        """An estimate from the mean of recent steps; None when the number of steps is not known."""
        if not self.state.max_steps or not self._durations:
            return None
        mean = sum(self._durations) / len(self._durations)
        return mean * max(0, self.state.max_steps - self.state.step)


class PlainReporter:
    """For pipes, files and terminals that ask for nothing fancy. Writes may raise BrokenPipeError: nobody reads."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream
        self._next_line = 0.0
        self._said = ""

    def event(self, event: dict[str, Any]) -> None:
        """Print lasting lines at once, progress now and then."""
        self._progress.take(event)
        text = describe_event(event)
        if text is not None:
            self._print(text)
        if event["kind"] == "step" and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_SECONDS
            self._print(self._progress.line())
        elif event["kind"] == "phase" and event["name"] != self._said and self._progress.state.last_step is None:
            # Only on the way to the first step: later on, each checkpoint would add two lines.
            self._said = event["name"]
            self._print(describe_phase(event))

    def tick(self) -> None:
        """Nothing to redraw."""

    def notice(self, text: str) -> None:
        """Print it."""
        self._print(clean(text))

    def close(self) -> None:
        """Nothing to restore."""

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveReporter:
    """For a terminal: a block that is redrawn, and lasting lines above it."""

    def __init__(self, progress: Progress, console: Console) -> None:
        from rich.live import Live

        self._progress = progress
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._next_redraw = 0.0

    def event(self, event: dict[str, Any]) -> None:
        """Print lasting lines at once; the block waits for the next tick."""
        self._progress.take(event)
        text = describe_event(event)
        if text is not None:
            self.notice(text)

    def tick(self) -> None:
        """Redraw twice a second at most."""
        from rich.text import Text

        if time.monotonic() >= self._next_redraw:
            self._next_redraw = time.monotonic() + REDRAW_SECONDS
            # Text, not str: rich would read "[...]" in a str as markup.
            self._live.update(Text("\n".join(self._progress.lines())), refresh=True)

    def notice(self, text: str) -> None:
        """Print it above the block."""
        from rich.text import Text

        self._live.console.print(Text(clean(text)), highlight=False)

    def close(self) -> None:
        """Take the block away."""
        self._live.stop()


def reporter(summary: RunSummary) -> Reporter:
    """The reporter that fits standard output."""
    progress = Progress(clean(summary.run), summary.simulated)
    progress.capacity_bytes = summary.predicted.get("capacity_bytes")
    progress.state.max_steps = summary.max_steps
    console = make_console()
    redrawable = sys.stdout.isatty() and not console.is_dumb_terminal
    return LiveReporter(progress, console) if redrawable else PlainReporter(progress, sys.stdout)


def make_console() -> Console:
    """A console on standard output that lets a closed pipe be noticed by the caller, and reads no markup."""
    from rich.console import Console

    class OurConsole(Console):
        def on_broken_pipe(self) -> None:
            """rich would end the process here; a follower has to leave in its own way."""
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return OurConsole(markup=False, emoji=False, highlight=False)


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Names and values in two columns: wrapped on a terminal, a line each elsewhere so that paths stay whole."""
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in rows)
        sys.stdout.write("".join(f"{name:<{width}}  {value}".rstrip() + "\n" for name, value in rows))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    make_console().print(table)


def result_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """The table at the end of a run."""
    total = f" of {summary.max_steps:,}" if summary.max_steps else ""
    rows = [("run", clean(summary.run)), ("status", status_words(summary)), ("steps", f"{summary.step:,}{total}")]
    first = summary.metrics.get("first", {})
    if "train_loss" in summary.metrics:
        before, after = format_number(first.get("train_loss")), format_number(summary.metrics["train_loss"])
        rows.append(("loss", f"{before} -> {after}"))
    for name, value in summary.metrics.items():
        if name not in ("train_loss", "tokens_per_second", "first"):
            label = {"loss": "validation loss"}.get(name, clean(name).replace("_", " "))
            before = f"{format_score(name, first[name])} -> " if name in first else ""
            rows.append((label, before + format_score(name, value)))
    times = {0: "never", 1: "once, survived"}
    rows.append(("out of memory", times.get(summary.backoffs, f"{summary.backoffs} times, survived")))
    rows.append(("samples lost", f"{summary.samples_lost:,}"))
    rows += _memory_rows(summary)
    if summary.seconds is not None:
        rows.append(("time", format_duration(summary.seconds)))
    if summary.result:
        rows.append(("result", clean(Path(summary.path) / str(summary.result))))
    return rows


def status_words(summary: RunSummary) -> str:
    """The status, the device's nature beside it, and why the run ended where it says."""
    why = f": {clean(summary.reason)}" if summary.reason else ""
    return summary.status + (" (simulated device)" if summary.simulated else "") + why


def _memory_rows(summary: RunSummary) -> list[tuple[str, str]]:
    measured, predicted = summary.measured.get("peak_bytes"), summary.predicted.get("peak_bytes")
    capacity = summary.predicted.get("capacity_bytes")
    if measured is None:
        return []
    said = f"{format_bytes(measured)}" + (f" of {format_bytes(capacity)}" if capacity else "")
    foretold = summary.measured.get("predicted")
    if foretold:
        shape = f"{summary.measured['sequences']} × {summary.measured['length']} tokens"
        return [("peak memory", f"{said}, predicted {format_bytes(foretold['peak_bytes'])} for {shape}")]
    return [("peak memory", said + (f", planned {format_bytes(predicted)}" if predicted else ""))]
