"""`tunedeck compare`: shows runs side by side. What is compared, and how, is in `engine.journal.compare`.

Try: `tunedeck compare RUN RUN`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.options import JsonOption, RunsOption, find_run
from engine.commands.output import make_console, print_json, print_notices
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.journal.compare import Comparison

RunArguments = Annotated[
    list[str],
    typer.Argument(metavar="RUN RUN...", help="Two runs or more: paths, names, prefixes.", show_default=False),
]


def compare(targets: RunArguments, as_json: JsonOption = False, runs: RunsOption = None) -> None:
    """Compare runs: the settings that differ, the scores, the best."""
    from engine.journal.compare import compare as compare_runs

    directories = [find_run(target, runs) for target in targets]
    if len({directory.path for directory in directories}) < 2:
        raise UsageError("compare needs two different runs or more", fix="list the runs with: tunedeck runs")
    comparison = compare_runs(list(dict.fromkeys(directories)))
    if as_json:
        print_json(comparison.as_json(), indent=None)
    else:
        _print(comparison)


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
