"""Commands about existing runs: list, show, rename and delete them, and send requests to their engines."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.completion import run_names
from engine.commands.shared import (
    JsonOption,
    RunArgument,
    RunsOption,
    find_run,
    print_json,
    print_line,
    print_notices,
    print_progress,
    print_rows,
    print_table,
    runs_folder,
)
from engine.errors import EnvironmentProblem, StoppedError, TunedeckError, UsageError

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory
    from engine.journal.summary import RunSummary, SummaryReader


SHOWN = (
    "run", "status", "step", "max_steps", "metrics", "backoffs", "samples_lost", "predicted", "measured", "result",
    "path", "name", "started", "updated", "seconds", "reason", "last_error", "exit_code", "model", "profile", "recipe",
    "simulated", "phase", "checkpoints", "oom_reports", "warnings", "damaged_lines", "problems",
)  # fmt: skip
"""Keys of `show --json`, in order."""

LISTED = (
    "run", "path", "name", "status", "step", "max_steps", "metrics", "backoffs", "model", "profile", "recipe",
    "simulated", "started", "updated", "damaged_lines", "problems",
)  # fmt: skip
"""Keys of each entry of `runs --json`."""

WATCH_POLL_SECONDS = 0.25


def runs(as_json: JsonOption = False, folder: RunsOption = None) -> None:
    """List the runs of the runs folder, newest first."""
    from engine.journal.event_text import clean
    from engine.journal.folder_summaries import FolderSummaries
    from engine.journal.index import list_runs
    from engine.journal.summary_text import file_problems

    place = runs_folder(folder)
    kept = FolderSummaries(place)
    directories = list_runs(place)
    summaries = [kept.of(directory) for directory in directories]
    kept.write(directories)
    if as_json:
        print_json([{key: getattr(summary, key) for key in LISTED} for summary in summaries])
    elif not summaries:
        print_progress(f"no runs in {place}")
    else:
        _print_table(summaries)
    print_notices(f"{clean(summary.run)}: {problem}" for summary in summaries for problem in file_problems(summary))


def _print_table(summaries: list[RunSummary]) -> None:
    from engine.journal.event_text import clean, format_number

    rows = []
    for summary in summaries:
        step = f"{summary.step:,}" + (f"/{summary.max_steps:,}" if summary.max_steps else "")
        loss = format_number(summary.metrics["train_loss"]) if "train_loss" in summary.metrics else "-"
        device = "simulated" if summary.simulated else summary.profile
        cells = (summary.run, summary.status, step, loss, str(summary.backoffs), device, summary.model)
        rows.append([clean(cell) for cell in cells])
    print_table(("run", "status", "step", "loss", "ooms", "device", "model"), rows, right=("step", "loss", "ooms"))


def show(
    run: RunArgument,
    as_json: JsonOption = False,
    oom: Annotated[bool, typer.Option("--oom", help="Show every out-of-memory event, and the newest report.")] = False,
    runs: RunsOption = None,
) -> None:
    """Show one run: progress, scores, memory, and the next commands."""
    from engine.journal.checkpoints_on_disk import best_step, learned_memory
    from engine.journal.labels import read_labels
    from engine.journal.summary import SummaryReader
    from engine.journal.summary_text import (
        checkpoint_rows,
        detail_rows,
        label_rows,
        next_steps,
        result_rows,
        sample_rows,
    )

    directory = find_run(run, runs)
    labels = read_labels(directory)
    reader = SummaryReader(directory)
    summary = reader.refresh()
    if oom and not as_json:
        _print_oom(reader, summary.oom_reports)
        return
    best, learned = best_step(directory.checkpoints), learned_memory(directory)
    if as_json:
        document = {key: getattr(summary, key) for key in SHOWN} | {"best": best, "learned": learned}
        document |= {"tags": list(labels.tags), "note": labels.note}
        print_json(document | ({"oom": _oom_document(reader, summary.oom_reports)} if oom else {}))
        return
    rows = result_rows(summary) + label_rows(labels) + checkpoint_rows(summary.checkpoints, best, learned)
    rows += sample_rows(reader.state.evals[-1].get("samples") if reader.state.evals else None)
    print_rows(rows + detail_rows(summary) + next_steps(summary, shown=True))


def _oom_document(reader: SummaryReader, reports: list[str]) -> dict[str, Any]:
    from engine.journal.oom_text import read_report

    found = [{"path": path, "report": read_report(reader.directory.path / path)} for path in reports]
    return {"events": reader.state.backoffs, "reports": found}


def _print_oom(reader: SummaryReader, reports: list[str]) -> None:
    from engine.journal.event_text import clean, describe_event
    from engine.journal.oom_text import report_lines, report_or_problem

    lines = [describe_event(event) or "" for event in reader.state.backoffs] or ["no out-of-memory events"]
    lines += ["", *(f"report: {clean(path)}" for path in reports)] if reports else []
    newest = report_or_problem(reader.directory.path / reports[-1]) if reports else {}
    if isinstance(newest, str):
        lines += [f"the newest report: {newest}"]
    else:
        lines += ["", *report_lines(newest)] if newest else []
    print_line("\n".join(lines))


def log(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the run ends.")] = False,
    runs: RunsOption = None,
) -> None:
    """Print the output of the engine process (engine.log)."""
    from engine.journal.summary import SummaryReader

    directory = find_run(run, runs)
    if not directory.log.exists() and not follow:
        raise UsageError(f"run {directory.name} has no engine.log yet", expected="a run that has been started")
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
    """From byte `offset` on, without control characters; returns the offset of the log's end."""
    from engine.journal.event_text import clean

    try:
        with directory.log.open("rb") as file:
            file.seek(offset)
            for line in file:
                # The indentation is kept, because a traceback is unreadable without it; the text after it is cleaned.
                text = line.decode("utf-8", errors="replace").expandtabs().rstrip()
                print_line(text[: len(text) - len(text.lstrip(" "))] + clean(text))
            sys.stdout.flush()
            return file.tell()
    except FileNotFoundError:
        return 0


def watch(run: RunArgument, runs: RunsOption = None) -> None:
    """Follow a run's progress. Ctrl-C ends the command, not the run."""
    from engine.commands.follow import make_reporter, print_ending
    from engine.journal.events import EventTail, end_of_events
    from engine.journal.summary import SummaryReader

    directory = find_run(run, runs)
    tail = EventTail(directory.events, offset=end_of_events(directory.events))
    reader = SummaryReader(directory)
    summary = reader.refresh()
    if summary.status in ("running", "queued"):
        reporter = make_reporter(summary)
        try:
            while summary.status in ("running", "queued"):
                for event in tail.poll():
                    reporter.event(event)
                reporter.tick()
                time.sleep(WATCH_POLL_SECONDS)
                summary = reader.refresh()
        except KeyboardInterrupt:
            print_progress(f"stopped watching; {directory.name} continues")
            return
        finally:
            reporter.close()
    print_ending(directory, as_json=False)


def rm(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", autocompletion=run_names, help="Runs without a running engine.", show_default=False
        ),
    ],
    runs: RunsOption = None,
) -> None:
    """Move runs into the .trash folder of their runs folder."""
    from engine.journal.index import move_to_trash

    for directory in [find_run(run, runs) for run in given]:
        print_line(f"{directory.name} is now in {move_to_trash(directory)}")


def rename(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name; the timestamp before it stays.")],
    runs: RunsOption = None,
) -> None:
    """Rename a run that has no running engine."""
    from engine.journal.index import list_runs, record_start
    from engine.journal.labels import referring_runs, rename_run

    directory = find_run(run, runs)
    users = list(referring_runs(directory, list_runs(directory.path.parent)))
    if users:
        raise UsageError(
            f"{directory.name} is used by {', '.join(users[:3])}, which could not find it under a new name",
            fix=f"tag it instead: tunedeck tag {directory.name} {name}",
        )
    renamed = rename_run(directory, name)
    warning = record_start(renamed)
    print_notices([warning] if warning else [])
    print_line(f"{directory.name} is now {renamed.name}")


def tag(
    run: RunArgument,
    tags: Annotated[list[str] | None, typer.Argument(metavar="TAG...", help="Tags to add.", show_default=False)] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", metavar="TAG", help="Tag to remove.")] = None,
    note: Annotated[str | None, typer.Option("--note", metavar="TEXT", help='Note on the run; "" removes it.')] = None,
    runs: RunsOption = None,
) -> None:
    """Add tags and a note to a run, and store them with it.

    Without tags and note, print the current ones.
    """
    from engine.journal.labels import Labels, read_labels, write_labels

    directory = find_run(run, runs)
    before = read_labels(directory)
    missing = [each for each in remove or () if each not in before.tags]
    if missing:
        raise UsageError(f"{directory.name} has no tag {missing[0]!r}", expected=f"one of: {', '.join(before.tags)}")
    kept = [each for each in before.tags if each not in (remove or ())]
    after = Labels((*kept, *(tags or ())), before.note if note is None else note.strip())
    if after != before:
        write_labels(directory, after)
    from engine.journal.summary_text import label_rows

    print_rows(label_rows(read_labels(directory)) or [("tags", "none")])


WAIT_POLL_SECONDS = 0.5


def stop(run: RunArgument, runs: RunsOption = None) -> None:
    """Stop a run after the current step, with a checkpoint. Repeat the command to stop it immediately."""
    from engine.journal.summary import summarise
    from engine.launch.process import force_stop

    directory = find_run(run, runs)
    if summarise(directory).stopping:
        force_stop(directory)
        print_line(f"{directory.name} was stopped by force")
        print_line(f"continue from its last checkpoint with: tunedeck resume {directory.name}")
        return
    _request(directory, "stop", "stops after this step, with a checkpoint; repeat the command to stop it immediately")


def pause(run: RunArgument, runs: RunsOption = None) -> None:
    """Write a checkpoint, end the engine and free the device. `resume` continues the run."""
    directory = find_run(run, runs)
    effect = f"writes a checkpoint and frees the device; continue with: tunedeck resume {directory.name}"
    _request(directory, "pause", effect)


def checkpoint(run: RunArgument, runs: RunsOption = None) -> None:
    """Write a checkpoint now and continue training."""
    _request(find_run(run, runs), "checkpoint", "writes a checkpoint after this step and continues")


def wait(run: RunArgument, runs: RunsOption = None) -> None:
    """Wait until a run has ended, and exit with its exit code."""
    from engine.journal.summary import SUSPENDED, SummaryReader

    reader = SummaryReader(find_run(run, runs))
    told = False
    while (summary := reader.refresh()).status in ("queued", "running"):
        if summary.phase == SUSPENDED and not told:
            print_progress(_suspended_text(reader.directory))
        told = summary.phase == SUSPENDED
        time.sleep(WAIT_POLL_SECONDS)
    if summary.status == "stale":
        raise TunedeckError(
            f"the engine of {summary.run} ended without recording how the run ended",
            fix=f"read its log: tunedeck log {summary.run}; continue with: tunedeck resume {summary.run}",
        )
    raise typer.Exit(summary.exit_code if summary.exit_code is not None else StoppedError.exit_code)


def _request(directory: RunDirectory, name: str, effect: str) -> None:
    """Raises UsageError if the run is not running."""
    from engine.journal.control import send_request
    from engine.journal.summary import SUSPENDED, summarise

    summary = summarise(directory)
    status = summary.status
    if status != "running":
        raise UsageError(
            f"run {directory.name} is {status}: it has no running engine",
            expected="a running run",
            fix=f"tunedeck resume {directory.name}" if status in ("paused", "stopped", "stale") else "tunedeck runs",
        )
    try:
        send_request(directory, name)
    except OSError as error:
        raise EnvironmentProblem(f"the request cannot be written to {directory.control}: {error.strerror}") from error
    print_line(f"{directory.name} {effect}")
    if summary.phase == SUSPENDED:
        print_progress(_suspended_text(directory))


def _suspended_text(directory: RunDirectory) -> str:
    from engine.journal.liveness import engine_process

    engine = engine_process(directory)
    go_on = f"; to continue it: kill -CONT {engine.pid}" if engine is not None else ""
    return f"the engine of {directory.name} is suspended by a signal{go_on}"
