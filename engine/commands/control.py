"""`tunedeck stop`, `pause`, `checkpoint` and `wait`: send requests to a running engine, from any terminal.

Try: `tunedeck stop last`
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from engine.commands.options import RunArgument, RunsOption, find_run
from engine.commands.output import print_line
from engine.errors import EnvironmentProblem, StoppedError, TunedeckError, UsageError

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory

WAIT_POLL_SECONDS = 0.5
"""How often `wait` reads the run."""


def stop(run: RunArgument, runs: RunsOption = None) -> None:
    """Stop a run after the present step, with a checkpoint. A second time: at once, by force."""
    from engine.journal.summary import summarise
    from engine.launch.process import force_stop

    directory = find_run(run, runs)
    if summarise(directory).stopping:
        force_stop(directory)
        print_line(f"{directory.name} was stopped by force")
        print_line(f"continue from its last checkpoint with: tunedeck resume {directory.name}")
        return
    _request(directory, "stop", "stops after this step, with a checkpoint; the same command again stops it at once")


def pause(run: RunArgument, runs: RunsOption = None) -> None:
    """Write a checkpoint, end the engine and free the device. `resume` continues the run."""
    directory = find_run(run, runs)
    effect = f"writes a checkpoint and frees the device; continue with: tunedeck resume {directory.name}"
    _request(directory, "pause", effect)


def checkpoint(run: RunArgument, runs: RunsOption = None) -> None:
    """Write a checkpoint now and go on training."""
    _request(find_run(run, runs), "checkpoint", "writes a checkpoint after this step and goes on")


def wait(run: RunArgument, runs: RunsOption = None) -> None:
    """Wait until a run has ended; exits with its exit code."""
    from engine.journal.summary import SummaryReader

    reader = SummaryReader(find_run(run, runs))
    while (summary := reader.refresh()).status in ("queued", "running"):
        time.sleep(WAIT_POLL_SECONDS)
    if summary.status == "stale":
        raise TunedeckError(
            f"the engine of {summary.run} is gone without recording how the run ended",
            fix=f"read its log: tunedeck log {summary.run}; continue with: tunedeck resume {summary.run}",
        )
    raise typer.Exit(summary.exit_code if summary.exit_code is not None else StoppedError.exit_code)


def _request(directory: RunDirectory, name: str, effect: str) -> None:
    """Send request `name` to the run's engine, then print `effect`. Raises UsageError if the run is not running."""
    from engine.journal.control import send_request
    from engine.journal.summary import summarise

    status = summarise(directory).status
    if status != "running":
        raise UsageError(
            f"run {directory.name} is {status}: no engine is there to ask",
            expected="a running run",
            fix=f"tunedeck resume {directory.name}" if status in ("paused", "stopped", "stale") else "tunedeck runs",
        )
    try:
        send_request(directory, name)
    except OSError as error:
        raise EnvironmentProblem(f"the request cannot be written into {directory.control}: {error.strerror}") from error
    print_line(f"{directory.name} {effect}")
