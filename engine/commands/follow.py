"""Starts an engine for `train` and `resume`, and reports its run on the terminal until it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

import typer

from engine.commands.shared import make_console, print_json, print_notices, print_progress, print_rows
from engine.config.files.text import visible
from engine.journal.directory import HeldRunDirectory, RunDirectory
from engine.journal.event_text import clean, describe_event, describe_phase
from engine.journal.events import Event, EventTail
from engine.journal.summary import RunSummary, SummaryReader, summarise
from engine.journal.summary_text import Progress, next_steps, result_rows, sample_rows
from engine.launch.process import (
    DETACHED_CODE,
    POLL_SECONDS,
    FileOffsets,
    follow_engine,
    start_engine,
    wait_until_running,
)

if TYPE_CHECKING:
    from rich.console import Console


REDRAW_SECONDS = 0.5
"""Least time between two redraws: more would slow an SSH connection down."""

PLAIN_SECONDS = 10.0
"""Progress lines without a terminal: few enough for the log of a long run."""


class Reporter(Protocol):
    def event(self, event: Event) -> None:
        """Show one event of the run."""

    def tick(self) -> None:
        """Called about four times a second."""

    def notice(self, text: str) -> None:
        """A sentence that does not come from the run's events."""

    def close(self) -> None:
        """Stop showing the run and restore the screen."""


class PlainReporter:
    """For a pipe, a file or a dumb terminal. Writing raises BrokenPipeError when the reader is gone."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream
        self._next_line = 0.0
        self._shown_phase = ""

    def event(self, event: Event) -> None:
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
        """Nothing: printed lines are not redrawn."""

    def notice(self, text: str) -> None:
        self._print(clean(text))

    def close(self) -> None:
        """Nothing to restore."""

    def _print(self, text: str) -> None:
        self._stream.write(visible(text, keep="\n\t") + "\n")
        self._stream.flush()


class LiveReporter:
    def __init__(self, progress: Progress, console: Console) -> None:
        from rich.live import Live

        self._progress = progress
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._next_redraw = 0.0

    def event(self, event: Event) -> None:
        """The status block follows at the next tick."""
        self._progress.take(event)
        text = describe_event(event)
        if text is not None:
            self.notice(text)

    def tick(self) -> None:
        from rich.text import Text

        if time.monotonic() >= self._next_redraw:
            self._next_redraw = time.monotonic() + REDRAW_SECONDS
            # Text, not str: rich would read "[...]" in a str as markup.
            self._live.update(Text("\n".join(self._progress.lines())), refresh=True)

    def notice(self, text: str) -> None:
        from rich.text import Text

        self._live.console.print(Text(clean(text)), highlight=False)

    def close(self) -> None:
        self._live.stop()


class JsonReporter:
    def event(self, event: Event) -> None:
        print_json(event, indent=None)
        sys.stdout.flush()

    def tick(self) -> None:
        """Nothing: printed lines are not redrawn."""

    def notice(self, text: str) -> None:
        """Standard error: standard output is for events."""
        print_progress(text)

    def close(self) -> None:
        """Nothing to restore."""


def make_reporter(summary: RunSummary, *, as_json: bool = False) -> Reporter:
    if as_json:
        return JsonReporter()
    progress = Progress(clean(summary.run), summary.simulated)
    progress.capacity_bytes = summary.predicted.get("capacity_bytes")
    progress.state.max_steps = summary.max_steps
    console = make_console()
    redrawable = sys.stdout.isatty() and not console.is_dumb_terminal
    return LiveReporter(progress, console) if redrawable else PlainReporter(progress, sys.stdout)


def start_and_follow(
    directory: RunDirectory, *, resume: bool = False, from_step: int | None = None, detach: bool, as_json: bool
) -> None:
    """With `detach`, return as soon as the engine runs. Raises typer.Exit with the engine's exit code."""
    directory = HeldRunDirectory(directory.path)
    start = FileOffsets.of(directory)
    process = start_engine(directory, resume=resume, resume_from=from_step)
    if detach:
        wait_until_running(directory, process, start=start)
        _print_detached(directory, process, as_json)
        return
    reporter = make_reporter(summarise(directory), as_json=as_json)
    raise typer.Exit(_follow_with(reporter, directory, process, start, as_json))


def view_run(directory: RunDirectory, offset: int, *, as_json: bool) -> None:
    """Print a run's events from byte `offset` on, until standard input is closed; for rank 0 of a launcher's job, which
    runs this beside itself. The launcher's signals are meant for rank 0, so this process ignores them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    reporter = make_reporter(summarise(directory), as_json=as_json)
    tail = EventTail(directory.events, offset=offset)
    ended = finished = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], POLL_SECONDS)[0])
        for event in tail.poll():
            finished = event["kind"] == "run_finished"
            reporter.event(event)
        reporter.tick()
    reporter.close()
    if finished:
        print_ending(directory, as_json=as_json)


def _follow_with(
    reporter: Reporter, directory: RunDirectory, process: subprocess.Popen[bytes], start: FileOffsets, as_json: bool
) -> int:
    try:
        code = follow_engine(
            directory,
            process,
            on_event=reporter.event,
            on_tick=reporter.tick,
            on_notice=reporter.notice,
            start=start,
        )
        if process.returncode is None:
            _silence_output()
            return DETACHED_CODE
    finally:
        if process.returncode is not None:
            reporter.close()
    print_ending(directory, as_json=as_json)
    return code


def print_ending(directory: RunDirectory, *, as_json: bool) -> None:
    """The table of results and the commands to type next; the error that ended the run goes to stderr."""
    reader = SummaryReader(directory)
    summary, evals = reader.refresh(), reader.state.evals
    if not as_json:
        answers = sample_rows(evals[-1].get("samples") if evals else None)
        print_rows([*result_rows(summary), *answers, *next_steps(summary)])
    if summary.last_error:
        print_notices(["\n  ".join(map(clean, summary.last_error.splitlines()))])


def _print_detached(directory: RunDirectory, process: subprocess.Popen[bytes], as_json: bool) -> None:
    if as_json:
        print_json({"run": directory.name, "path": str(directory.path), "pid": process.pid}, indent=None)
        return
    print_rows(
        [
            ("running", directory.name),
            ("process", str(process.pid)),
            ("watch", f"tunedeck watch {directory.name}"),
            ("stop", f"tunedeck stop {directory.name}"),
        ]
    )


def _silence_output() -> None:
    """Whoever read stdout and stderr is gone, and the interpreter's last flush would fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
