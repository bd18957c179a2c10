"""`tunedeck forward`, and the hidden command of the process that follows a run for a tracker.

Try: `tunedeck forward last --to tensorboard`
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.options import RunArgument, RunsOption, find_run
from engine.commands.output import print_line
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory

NICENESS = 10
"""Priority below that of the engine, which needs the processors more."""

ToOption = Annotated[
    list[str] | None,
    typer.Option(
        "--to", metavar="TRACKER", help="tensorboard, wandb or trackio; by default the recipe's.", show_default=False
    ),
]


def forward(run: RunArgument, to: ToOption = None, runs: RunsOption = None) -> None:
    """Forward what an experiment tracker does not have of a run yet. While a run trains this is done by itself."""
    from engine.journal.stages import stage_directories
    from engine.trackers.follow import forward_all

    directory = find_run(run, runs)
    names = to or _trackers_of(directory)
    for part in stage_directories(directory) or [directory]:
        for name in names:
            count = forward_all(part, name)
            print_line(f"{part.name}: {count} event{'s' * (count != 1)} forwarded to {name}")


def _trackers_of(directory: RunDirectory) -> list[str]:
    """The trackers of the run's recipe. Raises UsageError if there are none."""
    from engine.spec.load import load_run_spec

    names: list[str] = list(dict.fromkeys(load_run_spec(directory.run_toml, own=True).recipe.trackers.use))
    if not names:
        raise UsageError(
            f"the recipe of {directory.name} names no tracker",
            expected="trackers.use in the recipe, or --to",
            fix=f"tunedeck forward {directory.name} --to tensorboard",
        )
    return names


def tracker_process(
    directory: Annotated[Path, typer.Argument()],
    name: Annotated[str, typer.Argument()],
    engine: Annotated[int, typer.Option("--engine")],
    after: Annotated[int, typer.Option("--after")],
) -> None:
    """Forward a run to a tracker while its engine lives: started by the engine, never by hand."""
    from engine.journal.directory import RunDirectory
    from engine.trackers.follow import follow_engine

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what ends the engine ends this process after the last event
    os.nice(NICENESS)
    follow_engine(RunDirectory(directory), name, engine, after)
