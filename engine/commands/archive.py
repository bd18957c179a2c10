"""`tunedeck export` and `tunedeck import`: a run as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.commands.shared import RunArgument, RunsOption, find_run, print_line, print_notices, runs_folder

OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Where to; by default RUN.tunedeck in this folder.")
]


def export(
    run: RunArgument,
    weights: Annotated[bool, typer.Option("--weights", help="With the result's weights.")] = False,
    out: OutOption = None,
    runs: RunsOption = None,
) -> None:
    """Write a run into one file, for another machine. There it can be shown, compared and repeated."""
    from engine.journal.archive import SUFFIX, export_run
    from engine.journal.event_text import format_bytes

    directory = find_run(run, runs)
    target = (out or Path(f"{directory.name}{SUFFIX}")).expanduser().absolute()
    size_bytes = export_run(directory, target, weights=weights)
    print_line(f"{target} ({format_bytes(size_bytes)}); elsewhere: tunedeck import {target.name}")


def import_archive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What export wrote.", show_default=False)],
    runs: RunsOption = None,
) -> None:
    """Take an exported run into the folder of runs."""
    from engine.journal.archive import import_run

    made = import_run(file.expanduser(), runs_folder(runs))
    print_line(f"{made.path}; repeat it: tunedeck train --run-spec {made.run_toml}")
    print_notices(["an imported run has no --on-finish and no --trust-remote-code; whoever repeats it gives them anew"])
