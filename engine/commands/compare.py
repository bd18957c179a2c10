"""`tunedeck compare`: shows runs side by side. What is compared, and how, is in `engine.journal.compare`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.completion import run_names
from engine.commands.shared import (
    JsonOption,
    RunsOption,
    find_result_run,
    find_run,
    make_console,
    print_json,
    print_notices,
    print_text,
    runs_folder,
)
from engine.errors import UsageError, WorseError

if TYPE_CHECKING:
    from engine.journal.compare import Comparison
    from engine.journal.directory import RunDirectory
    from engine.journal.folder_summaries import FolderSummaries
    from engine.journal.score_groups import Gains

RunArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN RUN...",
        autocompletion=run_names,
        help="Two or more runs: paths, names or prefixes.",
        show_default=False,
    ),
]


MetricOption = Annotated[
    str | None, typer.Option("--metric", metavar="M", help="Show this score for each checkpoint.", show_default=False)
]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="RUN|base",
        autocompletion=run_names,
        help="With --metric: show the gains over this run.",
        show_default=False,
    ),
]


FailIfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if", metavar="EXPR", show_default=False,
        help="Exit with code 8 if a score changed by this much, compared with --against or the first run: "
"\"exact_match < -1%\".",
    ),
]  # fmt: skip


CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV with exact values and one column per run.")]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown, for a report.")]


def compare(
    targets: RunArguments,
    metric: MetricOption = None,
    against: AgainstOption = None,
    fail_if: FailIfOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    as_markdown: MarkdownOption = False,
    runs: RunsOption = None,
) -> None:
    """Compare runs: settings that differ, scores, and the best run. With --metric and --against, also the gains."""
    from engine.commands.compare_formats import comparison_csv, comparison_markdown
    from engine.journal.compare import compare as compare_runs
    from engine.journal.compare import failures, parse_condition
    from engine.journal.event_text import clean
    from engine.journal.folder_summaries import FolderSummaries
    from engine.journal.score_groups import gains, refuse_unscored

    if as_json + as_csv + as_markdown > 1:
        raise UsageError("--json, --csv and --markdown exclude each other", fix="choose one of them")
    conditions = [parse_condition(text) for text in fail_if or ()]
    kept = FolderSummaries(runs_folder(runs))
    directories = [directory for target in targets for directory in _find(target, runs, kept)]
    if len({directory.path for directory in directories}) < 2:
        raise UsageError("compare needs at least two different runs", fix="list the runs with: tunedeck runs")
    directories = list(dict.fromkeys(directories))
    found = None
    reference = _reference(against, runs, directories) if against is not None else directories[0].name
    if against is not None and not (conditions and metric is None):
        found = gains(directories, _metric(metric, against), reference)
    if metric is not None and found is None:
        refuse_unscored(directories, metric)
    failed = failures(directories, conditions, reference)
    comparison = compare_runs(directories, kept.of)
    if as_json:
        more = {"gains": asdict(found)} if found else {}
        gate = {"failed": [each._asdict() for each in failed]} if conditions else {}
        print_json(comparison.as_json() | more | gate, indent=None)
    elif as_csv or as_markdown:
        write = comparison_csv if as_csv else comparison_markdown
        print_text(write(comparison, metric, found))
    else:
        _print(comparison, metric)
        if found is not None:
            _print_gains(found)
    if not as_json:
        print_notices(clean(warning) for warning in comparison.warnings)
    if failed:
        raise WorseError(
            "\n".join(f"{each.condition}: {each.sentence}" for each in failed),
            expected="all scores are within --fail-if",
        )


def _metric(metric: str | None, against: str) -> str:
    """Raises UsageError if --metric is not given."""
    if metric is None:
        raise UsageError(
            f"--against {against} needs --metric M, the score whose gains are shown",
            fix="add --metric loss",
        )
    return metric


def _reference(against: str, runs: Path | None, directories: list[RunDirectory]) -> str:
    """The run's name, or "base"; adds the run to `directories` if it is not one of them."""
    from engine.journal.score_groups import BASE

    if against == BASE:
        return BASE
    found = find_result_run(against, runs)
    if found.path not in {directory.path for directory in directories}:
        directories.append(found)
    return found.name


def _find(target: str, runs: Path | None, kept: FolderSummaries) -> list[RunDirectory]:
    """The run that `target` names, or all runs of the sweep that "sweep:ID" names."""
    from engine.journal.folder_summaries import runs_of_sweep
    from engine.journal.index import list_runs

    if not target.startswith("sweep:"):
        return [find_run(target, runs)]
    return runs_of_sweep(target.removeprefix("sweep:"), list_runs(runs_folder(runs))[::-1], kept)


def _print(comparison: Comparison, metric: str | None) -> None:
    """Runs as columns; a star marks the best score of a row. `metric` adds its value at each checkpoint."""
    from rich.table import Table
    from rich.text import Text

    from engine.journal.compare import comparison_rows
    from engine.journal.event_text import clean

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for run, status in zip(comparison.runs, comparison.statuses, strict=True):
        # Long names are folded, never cut: two runs may differ in the last letters only.
        table.add_column(Text(f"{clean(run)}\n{status}"), overflow="fold", justify="right")
    for number, row in enumerate(comparison_rows(comparison, metric)):
        if not row.cells and number:
            table.add_section()
        best = row.best or [False] * len(row.cells)
        cells = [Text(clean(cell) + (" *" if wins else "  ")) for cell, wins in zip(row.cells, best, strict=True)]
        table.add_row(Text(clean(row.label), style="" if row.cells else "bold"), *cells)
    console = make_console()
    console.print(table)
    if comparison.sentence:
        console.print(Text(clean(comparison.sentence)), soft_wrap=True)


def _print_gains(found: Gains) -> None:
    from rich.table import Table
    from rich.text import Text

    from engine.journal.event_text import clean

    table = Table("", found.metric, f"gain over {clean(found.against)}", "95 % interval", box=None, pad_edge=False)
    table.add_row(Text(clean(found.against)), f"{found.reference:.4g}", "", "")
    best = max(found.rows, key=lambda row: row.gain)
    for row in sorted(found.rows, key=lambda row: -row.gain):
        star = " *" if row is best and row.gain > 0 else ""
        table.add_row(Text(clean(row.run) + star), f"{row.value:.4g}", f"{row.gain:+.4g}", row.interval)
    console = make_console()
    console.print(table)
    console.print(clean(found.sentence), soft_wrap=True)
