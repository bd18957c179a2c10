"""`runs`, `show`, `log`, `watch`: looking at runs. Read-only: nothing here touches an engine.

Try: `tunedeck show last`
"""

from __future__ import annotations

import json as json_format
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.options import JsonOption, RunArgument, RunsOption, runs_folder
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory
    from engine.journal.summary import RunSummary

SHOWN = (
    "run", "status", "step", "max_steps", "metrics", "backoffs", "samples_lost", "predicted", "measured", "result",
    "path", "name", "started", "updated", "seconds", "reason", "last_error", "exit_code", "model", "profile", "recipe",
    "simulated", "phase", "checkpoints", "oom_reports", "warnings", "damaged_lines",
)  # fmt: skip
"""Keys of `show --json`, in order."""

LISTED = ("run", "path", "name", "status", "step", "max_steps", "metrics", "backoffs", "model", "profile", "recipe",
          "simulated", "started", "updated")  # fmt: skip
"""Keys of each entry of `runs --json`."""

WATCH_POLL_SECONDS = 0.25
"""How often `watch` and `log -f` look."""


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command(name="runs")(list_all)
    app.command()(show)
    app.command()(log)
    app.command()(watch)


def list_all(json: JsonOption = False, runs: RunsOption = None) -> None:
    """List the runs of the runs folder, newest first."""
    from engine.journal.index import list_runs
    from engine.journal.summary import summarise

    folder = runs_folder(runs)
    summaries = [summarise(directory) for directory in list_runs(folder)]
    if json:
        _print_json([{key: getattr(summary, key) for key in LISTED} for summary in summaries])
    elif not summaries:
        sys.stderr.write(f"no runs in {folder}\n")
    else:
        _print_table(summaries)


def _print_table(summaries: list[RunSummary]) -> None:
    from rich.table import Table
    from rich.text import Text

    from engine.commands.progress import make_console
    from engine.journal.event_text import clean, format_number

    table = Table(box=None, pad_edge=False, header_style="bold")
    longest = max(len(clean(summary.run)) for summary in summaries)
    for title in ("run", "status", "step", "loss", "ooms", "device", "model"):
        # A run's name is there to be copied: it is never broken, the other columns give way.
        table.add_column(
            title,
            overflow="fold",
            no_wrap=title == "run",
            min_width=longest if title == "run" else None,
            justify="right" if title in ("step", "loss", "ooms") else "left",
        )
    for summary in summaries:
        step = f"{summary.step:,}" + (f"/{summary.max_steps:,}" if summary.max_steps else "")
        loss = format_number(summary.metrics["train_loss"]) if "train_loss" in summary.metrics else "-"
        device = "simulated" if summary.simulated else summary.profile
        cells = (summary.run, summary.status, step, loss, str(summary.backoffs), device, summary.model)
        table.add_row(*(Text(clean(cell)) for cell in cells))
    make_console().print(table)


def show(
    run: RunArgument,
    json: JsonOption = False,
    oom: Annotated[bool, typer.Option("--oom", help="Show every time memory ran out, and the reports.")] = False,
    runs: RunsOption = None,
) -> None:
    """Show one run: progress, scores, memory predicted and measured, the result."""
    from engine.journal.checkpoints_on_disk import best_step, learned_memory
    from engine.journal.index import resolve_run
    from engine.journal.summary import SummaryReader

    directory = resolve_run(run, runs_folder(runs))
    reader = SummaryReader(directory)
    summary = reader.refresh()
    if json:
        extra = {"oom": _oom(reader.directory, reader.state.backoffs, summary.oom_reports)} if oom else {}
        saved = {"best": best_step(directory.checkpoints), "learned": learned_memory(directory)}
        _print_json({**{key: getattr(summary, key) for key in SHOWN}, **saved, **extra})
    elif oom:
        _print_oom(reader.directory, reader.state.backoffs, summary.oom_reports)
    else:
        _print_summary(summary, directory)


def _print_summary(summary: RunSummary, directory: RunDirectory) -> None:
    from engine.commands.follow import next_steps
    from engine.commands.progress import print_rows, result_rows
    from engine.journal.event_text import clean, format_bytes

    rows = result_rows(summary)
    rows += [("model", clean(summary.model)), ("profile", clean(summary.profile)), ("recipe", clean(summary.recipe))]
    rows += _saved_rows(directory, summary.checkpoints)
    measured = summary.measured.get("components", {})
    foretold = summary.measured.get("predicted") or summary.predicted
    for name, predicted in (foretold.get("components") or {}).items():
        seen = f", measured {format_bytes(measured[name])}" if name in measured else ""
        rows.append((f"  {clean(name)}", f"predicted {format_bytes(predicted)}{seen}"))
    rows += [("warning", clean(warning["text"])) for warning in summary.warnings]
    if summary.damaged_lines:
        rows.append(("warning", f"{summary.damaged_lines} damaged lines of events.jsonl were left out"))
    if summary.last_error:
        rows.append(("error", clean(summary.last_error)))
    rows.append(("folder", clean(summary.path)))
    print_rows(rows + next_steps(summary))


def _oom(directory: RunDirectory, backoffs: list[dict[str, Any]], reports: list[str]) -> dict[str, Any]:
    """Every failure as an event, and the reports that can be read, with their paths."""
    from engine.journal.oom_page import read_report

    found = [{"path": path, "report": read_report(directory.path / path)} for path in reports]
    return {"events": backoffs, "reports": found}


def _saved_rows(directory: RunDirectory, steps: list[int]) -> list[tuple[str, str]]:
    """The checkpoints that are on disk, and what the run has learned of its memory."""
    from engine.journal.checkpoints_on_disk import best_step, learned_memory
    from engine.journal.event_text import format_bytes

    if not steps:
        return []
    best = best_step(directory.checkpoints)
    rows = [("checkpoints", ", ".join(f"{step} (best)" if step == best else str(step) for step in steps))]
    found = learned_memory(directory)
    if found:
        failed = found["ceiling_bytes"] or found["passing_bytes"]
        limit = f", {format_bytes(failed)} failed" if failed else ""
        slope = f"; {found['slope']:.2f} real bytes for each predicted" if found["slope"] else ""
        budget = format_bytes(found["budget_bytes"])
        rows.append(("learned", f"micro-batches of up to {budget} predicted{limit}{slope}"))
        on = [name for name, value in (("recomputation", found["remedies"].get("checkpointing")),) if value]
        rows += [("in force", ", ".join(on))] if on else []
    return rows


def _print_oom(directory: RunDirectory, backoffs: list[dict[str, Any]], reports: list[str]) -> None:
    """A line for each failure, then the newest report in full."""
    from engine.journal.event_text import clean, describe_event
    from engine.journal.oom_page import read_report, report_lines

    lines = [describe_event(event) or "" for event in backoffs] or ["memory never ran out"]
    lines += ["", *(f"report: {clean(path)}" for path in reports)] if reports else []
    newest = read_report(directory.path / reports[-1]) if reports else None
    lines += ["", *report_lines(newest)] if newest else []
    sys.stdout.write("\n".join(lines) + "\n")


def log(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing until the run ends.")] = False,
    runs: RunsOption = None,
) -> None:
    """Print what the engine process wrote: its engine.log."""
    from engine.journal.index import resolve_run
    from engine.journal.summary import SummaryReader

    directory = resolve_run(run, runs_folder(runs))
    if not directory.log.exists() and not follow:
        raise UsageError(f"run {directory.name} has no engine.log yet", expected="a run that was started")
    reader = SummaryReader(directory)
    offset = 0
    try:
        while True:
            running = follow and reader.refresh().status in ("running", "queued")
            offset = _print_log(directory, offset)
            if not running:
                return
            time.sleep(WATCH_POLL_SECONDS)
    except KeyboardInterrupt:
        return


def _print_log(directory: RunDirectory, offset: int) -> int:
    """Print the log from `offset` on with its control characters taken out; returns where it ends now."""
    from engine.journal.event_text import clean

    try:
        with directory.log.open("rb") as file:
            file.seek(offset)
            for line in file:
                # Indentation is what makes a traceback readable, so only the text after it is cleaned.
                text = line.decode("utf-8", errors="replace").expandtabs().rstrip()
                sys.stdout.write(text[: len(text) - len(text.lstrip(" "))] + clean(text) + "\n")
            sys.stdout.flush()
            return file.tell()
    except FileNotFoundError:
        return 0


def watch(run: RunArgument, runs: RunsOption = None) -> None:
    """Follow a run on the screen without touching it; Ctrl-C leaves, and the run goes on."""
    from engine.commands.follow import print_ending
    from engine.commands.progress import reporter
    from engine.journal.events import EventTail, end_of_events
    from engine.journal.index import resolve_run
    from engine.journal.summary import SummaryReader

    directory = resolve_run(run, runs_folder(runs))
    tail = EventTail(directory.events, offset=end_of_events(directory.events))
    reader = SummaryReader(directory)
    summary = reader.refresh()
    if summary.status in ("running", "queued"):
        show_run = reporter(summary)
        try:
            while summary.status in ("running", "queued"):
                for event in tail.poll():
                    show_run.event(event)
                show_run.tick()
                time.sleep(WATCH_POLL_SECONDS)
                summary = reader.refresh()
        except KeyboardInterrupt:
            sys.stderr.write(f"not watching any more; {directory.name} goes on\n")
            return
        finally:
            show_run.close()
    print_ending(directory, as_json=False)


def _print_json(document: object) -> None:
    sys.stdout.write(json_format.dumps(document, indent=2) + "\n")
