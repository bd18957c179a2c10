"""`stop`, `pause`, `checkpoint`, `wait`: asking a running engine for something, from anywhere.

Try: `tunedeck stop last`
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import typer

from engine.commands.options import RunArgument, RunsOption, runs_folder
from engine.errors import EnvironmentProblem, TunedeckError, UsageError

WAIT_POLL_SECONDS = 0.5
"""How often `wait` looks at the run."""


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(stop)
    app.command()(pause)
    app.command()(checkpoint)
    app.command()(wait)


def stop(run: RunArgument, runs: RunsOption = None) -> None:
    """Stop a run after the present step, with a checkpoint. A second time: at once, by force."""
    from engine.journal.index import resolve_run
    from engine.journal.summary import summarise
    from engine.launch.process import force_stop

    directory = resolve_run(run, runs_folder(runs))
    if summarise(directory).stopping:
        force_stop(directory)
        _say(f"{directory.name} was stopped by force; go on from its last checkpoint: tunedeck resume {directory.name}")
        return
    _ask(run, runs, "stop", "stops after this step and writes a checkpoint; the same command again stops it at once")


def pause(run: RunArgument, runs: RunsOption = None) -> None:
    """Write a checkpoint, end the engine and free the device; `resume` goes on."""
    _ask(run, runs, "pause", "writes a checkpoint, frees the device and waits for: tunedeck resume")


def checkpoint(run: RunArgument, runs: RunsOption = None) -> None:
    """Write a checkpoint now and go on."""
    _ask(run, runs, "checkpoint", "writes a checkpoint after this step and goes on")


def wait(run: RunArgument, runs: RunsOption = None) -> None:
    """Wait until a run has ended; exits with its exit code."""
    from engine.journal.index import resolve_run
    from engine.journal.summary import SummaryReader

    reader = SummaryReader(resolve_run(run, runs_folder(runs)))
    summary = reader.refresh()
    while summary.status in ("queued", "running"):
        time.sleep(WAIT_POLL_SECONDS)
        summary = reader.refresh()
    if summary.status == "stale":
        raise TunedeckError(
            f"the engine of {summary.run} is gone without recording how the run ended",
            fix=f"see tunedeck log {summary.run}; go on with: tunedeck resume {summary.run}",
        )
    raise typer.Exit(summary.exit_code if summary.exit_code is not None else 130)


def _ask(run: str, runs: Path | None, name: str, promise: str) -> None:
    """Write a request for a run whose engine can still take it."""
    from engine.journal.control import send_request
    from engine.journal.index import resolve_run
    from engine.journal.summary import summarise

    directory = resolve_run(run, runs_folder(runs))
    status = summarise(directory).status
    if status != "running":
        raise UsageError(
            f"run {directory.name} is {status}: there is no engine to ask",
            expected="a running one",
            fix=f"tunedeck resume {directory.name}" if status in ("paused", "stopped", "stale") else "tunedeck runs",
        )
    try:
        send_request(directory, name)
    except OSError as error:
        raise EnvironmentProblem(f"the request cannot be written into {directory.control}: {error.strerror}") from error
    _say(f"{directory.name} {promise}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
