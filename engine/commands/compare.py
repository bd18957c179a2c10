"""`tunedeck compare`: runs side by side.

Try: `tunedeck compare RUN RUN`
"""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.options import JsonOption, RunsOption, runs_folder
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.journal.compare import Comparison

Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN RUN...", help="Two runs or more: paths, names, prefixes.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(compare)


def compare(targets: Runs, json: JsonOption = False, runs: RunsOption = None) -> None:
    """Tabulate runs: what differs in their settings, how they scored, and which is best."""
    from engine.journal.compare import compare as compare_runs
    from engine.journal.index import resolve_run

    folder: Path = runs_folder(runs)
    directories = [resolve_run(target, folder) for target in targets]
    if len({directory.path for directory in directories}) < 2:
        raise UsageError("comparing takes two different runs or more", fix="list them: tunedeck runs")
    found = compare_runs(list(dict.fromkeys(directories)))
    if json:
        sys.stdout.write(json_format.dumps(found.as_json()) + "\n")
        return
    _print(found)


def _print(found: Comparison) -> None:
    """Settings and scores as rows, runs as columns; the best score of a row carries a star."""
    from rich.table import Table
    from rich.text import Text

    from engine.commands.progress import make_console
    from engine.journal.compare import format_compared_score, format_setting
    from engine.journal.event_text import clean

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for name, status in zip(found.runs, found.statuses, strict=True):
        # One run's column must not hide another's: names are folded, never cut.
        table.add_column(Text(f"{clean(name)}\n{status}"), overflow="fold", justify="right")
    for key, values in found.settings.items():
        table.add_row(Text(clean(key)), *(Text(clean(format_setting(value))) for value in values))
    table.add_section()
    for key, scores in found.scores.items():
        winners = found.best.get(key, [])
        cells = [
            format_compared_score(key, score, name in winners) for name, score in zip(found.runs, scores, strict=True)
        ]
        table.add_row(Text(clean(key)), *map(Text, cells))
    make_console().print(table)
    for warning in found.warnings:
        sys.stderr.write(f"tunedeck: {clean(warning)}\n")
