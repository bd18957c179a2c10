"""Shows a run while it is followed: on a terminal, in a pipe, or as JSON lines.

On a terminal: a line for each event, and below these a status block of at most four lines, redrawn twice a second. In a
pipe or file: a line for each event, and a progress line every few seconds, without control codes. The text of the
status block comes from `engine.journal.progress`.

Try: `tunedeck train -p demo -r demo`, with and without `--json`, or piped into `cat`
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

from engine.commands.output import make_console, print_progress
from engine.journal.event_text import clean, describe_event, describe_phase
from engine.journal.events import Event
from engine.journal.progress import Progress
from engine.journal.summary import RunSummary

if TYPE_CHECKING:
    from rich.console import Console

REDRAW_SECONDS = 0.5
"""Least time between two redraws of the status block: more redraws would slow an SSH connection down."""

PLAIN_SECONDS = 10.0
"""Time between progress lines where there is no terminal: few enough for the log of a long run."""


class Reporter(Protocol):
    """Protocol of the objects that show a run while it is followed, from its events."""

    def event(self, event: Event) -> None:
        """Show one event of the run."""

    def tick(self) -> None:
        """Redraw the status block if enough time has passed; called about four times a second."""

    def notice(self, text: str) -> None:
        """Show a sentence that does not come from the run's events."""

    def close(self) -> None:
        """Stop showing the run and restore the screen."""


class PlainReporter:
    """Shows a run in a pipe, a file or a dumb terminal. Writing raises BrokenPipeError when the reader is gone."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream
        self._next_line = 0.0
        self._shown_phase = ""

    def event(self, event: Event) -> None:
        """Print the event's line at once, and a progress line every PLAIN_SECONDS seconds."""
        self._progress.take(event)
        text = describe_event(event)
        if text is not None:
            self._print(text)
        if event["kind"] == "step" and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_SECONDS
            self._print(self._progress.line())
        elif event["kind"] == "phase" and event["name"] != self._shown_phase and self._progress.state.last_step is None:
            # Phases are printed before the first step only: later on, each checkpoint would add two lines.
            self._shown_phase = event["name"]
            self._print(describe_phase(event))

    def tick(self) -> None:
        """Do nothing: printed lines are not redrawn."""

    def notice(self, text: str) -> None:
        """Print the sentence."""
        self._print(clean(text))

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveReporter:
    """Shows a run on a terminal: a status block that is redrawn, and the events' lines above it."""

    def __init__(self, progress: Progress, console: Console) -> None:
        from rich.live import Live

        self._progress = progress
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._next_redraw = 0.0

    def event(self, event: Event) -> None:
        """Print the event's line at once; the status block follows at the next tick."""
        self._progress.take(event)
        text = describe_event(event)
        if text is not None:
            self.notice(text)

    def tick(self) -> None:
        """Redraw the status block, twice a second at most."""
        from rich.text import Text

        if time.monotonic() >= self._next_redraw:
            self._next_redraw = time.monotonic() + REDRAW_SECONDS
            # Text, not str: rich would read "[...]" in a str as markup.
            self._live.update(Text("\n".join(self._progress.lines())), refresh=True)

    def notice(self, text: str) -> None:
        """Print the sentence above the status block."""
        from rich.text import Text

        self._live.console.print(Text(clean(text)), highlight=False)

    def close(self) -> None:
        """Remove the status block."""
        self._live.stop()


class JsonReporter:
    """Prints each event as a line of JSON, and nothing else on standard output."""

    def event(self, event: Event) -> None:
        """Print the event as one line of JSON."""
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    def tick(self) -> None:
        """Do nothing: printed lines are not redrawn."""

    def notice(self, text: str) -> None:
        """Print the sentence on standard error: standard output is for events."""
        print_progress(text)

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""


def make_reporter(summary: RunSummary, *, as_json: bool = False) -> Reporter:
    """Make the reporter for --json, a terminal, or other standard output."""
    if as_json:
        return JsonReporter()
    progress = Progress(clean(summary.run), summary.simulated)
    progress.capacity_bytes = summary.predicted.get("capacity_bytes")
    progress.state.max_steps = summary.max_steps
    console = make_console()
    redrawable = sys.stdout.isatty() and not console.is_dumb_terminal
    return LiveReporter(progress, console) if redrawable else PlainReporter(progress, sys.stdout)
