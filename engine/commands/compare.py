"""`tunedeck compare`: shows runs side by side. What is compared, and how, is in `engine.journal.compare`.

Try: `tunedeck compare RUN RUN`
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.options import JsonOption, RunsOption, find_run, runs_folder
from engine.commands.output import make_console, print_json, print_notices
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.journal.compare import Comparison
    from engine.journal.directory import RunDirectory

RunArguments = Annotated[
    list[str],
    typer.Argument(metavar="RUN RUN...", help="Two runs or more: paths, names, prefixes.", show_default=False),
]


def compare(targets: RunArguments, as_json: JsonOption = False, runs: RunsOption = None) -> None:
    """Compare runs: the settings that differ, the scores, the best."""
    from engine.journal.compare import compare as compare_runs

    directories = [directory for target in targets for directory in _find(target, runs)]
    if len({directory.path for directory in directories}) < 2:
        raise UsageError("compare needs two different runs or more", fix="list the runs with: tunedeck runs")
    comparison = compare_runs(list(dict.fromkeys(directories)))
    if as_json:
        print_json(comparison.as_json(), indent=None)
    else:
        _print(comparison)


def _find(target: str, runs: Path | None) -> list[RunDirectory]:
    """The run that `target` names, or all runs of the sweep that "sweep:ID" names."""
    from engine.journal.index import list_runs
    from engine.launch.create_sweep import runs_of_sweep

    if not target.startswith("sweep:"):
        return [find_run(target, runs)]
    return runs_of_sweep(target.removeprefix("sweep:"), list_runs(runs_folder(runs))[::-1])


def _print(comparison: Comparison) -> None:
    """Print settings and scores as rows, runs as columns; the best score of a row is marked with a star."""
    from rich.table import Table
    from rich.text import Text

    from engine.journal.compare import format_compared_score, format_setting
    from engine.journal.event_text import clean

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for run, status in zip(comparison.runs, comparison.statuses, strict=True):
        # Long names are folded, never cut: two runs may differ in the last letters only.
        table.add_column(Text(f"{clean(run)}\n{status}"), overflow="fold", justify="right")
    for key, values in comparison.settings.items():
        table.add_row(Text(clean(key)), *(Text(clean(format_setting(value))) for value in values))
    table.add_section()
    for key, scores in comparison.scores.items():
        best = comparison.best.get(key, [])
        cells = [
            format_compared_score(key, score, run in best) for run, score in zip(comparison.runs, scores, strict=True)
        ]
        table.add_row(Text(clean(key)), *map(Text, cells))
    make_console().print(table)
    print_notices(clean(warning) for warning in comparison.warnings)
