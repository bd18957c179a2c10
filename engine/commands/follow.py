"""Starting an engine for a command and showing it until it ends: shared by `train` and `resume`.

What may not live here: deciding what to run (`train`), or how a process is watched (`engine.launch.process`).

Try: `tunedeck train -p demo -r demo`, with and without `--json`, or piped into `head -3`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys

import typer

from engine.commands.progress import Reporter, print_rows, reporter, result_rows
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.journal.events import Event, EventTail, end_of_events
from engine.journal.summary import RunSummary, summarise
from engine.launch.process import DETACHED_CODE, POLL_SECONDS, follow_engine, start_engine, wait_until_running


def start_and_follow(
    directory: RunDirectory, *, resume: bool = False, from_step: int | None = None, detach: bool, as_json: bool
) -> None:
    """Start the engine on this run; follow it, or return once it runs. Exits with the engine's code."""
    offset = end_of_events(directory.events)
    log_offset = directory.log.stat().st_size if directory.log.exists() else 0
    process = start_engine(directory, resume=resume, resume_from=from_step)
    if detach:
        wait_until_running(directory, process, offset=offset, log_offset=log_offset)
        _print_detached(directory, process, as_json)
        return
    show = _JsonLines() if as_json else reporter(summarise(directory))
    raise typer.Exit(_follow_with(show, directory, process, offset, log_offset, as_json))


def view_run(directory: RunDirectory, offset: int, *, as_json: bool) -> None:
    """Show the run from byte `offset` of its events on until stdin ends: beside a rank 0 that somebody else started.

    Signals of the launcher are for that rank; this process ends when it does.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    show = _JsonLines() if as_json else reporter(summarise(directory))
    tail = EventTail(directory.events, offset=offset)
    over = finished = False
    while not over:
        over = bool(select.select([sys.stdin], [], [], POLL_SECONDS)[0])
        for event in tail.poll():
            finished = event["kind"] == "run_finished"
            show.event(event)
        show.tick()
    show.close()
    if finished:
        print_ending(directory, as_json=as_json)


def _follow_with(
    show: Reporter,
    directory: RunDirectory,
    process: subprocess.Popen[bytes],
    offset: int,
    log_offset: int,
    as_json: bool,
) -> int:
    try:
        code = follow_engine(
            directory,
            process,
            on_event=show.event,
            on_tick=show.tick,
            on_notice=show.notice,
            offset=offset,
            log_offset=log_offset,
        )
        if process.returncode is None:
            _leave_quietly()
            return DETACHED_CODE
    finally:
        if process.returncode is not None:
            show.close()
    print_ending(directory, as_json=as_json)
    return code


def print_ending(directory: RunDirectory, *, as_json: bool) -> None:
    """The last words: the table, what to type next, and on stderr the error that ended the run."""
    summary = summarise(directory)
    if not as_json:
        print_rows([*result_rows(summary), *next_steps(summary)])
    if summary.last_error:
        sys.stderr.write("tunedeck: " + "\n  ".join(map(clean, summary.last_error.splitlines())) + "\n")


def next_steps(summary: RunSummary) -> list[tuple[str, str]]:
    """What to type next, by status."""
    run = clean(summary.run)
    commands = {
        "done": [f"tunedeck show {run}", f"tunedeck eval {run}"],
        "paused": [f"tunedeck resume {run}"],
        "stopped": [f"tunedeck resume {run}", f"tunedeck show {run}"],
        "oom": [f"tunedeck show {run} --oom"],
        "failed": [f"tunedeck log {run}"],
    }.get(summary.status, [f"tunedeck show {run}"])
    return [("next" if index == 0 else "", command) for index, command in enumerate(commands)]


class _JsonLines:
    """The events themselves, a line each, and nothing else on standard output."""

    def event(self, event: Event) -> None:
        """Print it."""
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    def tick(self) -> None:
        """Nothing to redraw."""

    def notice(self, text: str) -> None:
        """On stderr: standard output is for events."""
        sys.stderr.write(text + "\n")

    def close(self) -> None:
        """Nothing to restore."""


def _print_detached(directory: RunDirectory, process: subprocess.Popen[bytes], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"run": directory.name, "path": str(directory.path), "pid": process.pid}) + "\n")
        return
    print_rows(
        [
            ("running", directory.name),
            ("process", str(process.pid)),
            ("watch", f"tunedeck watch {directory.name}"),
            ("stop", f"tunedeck stop {directory.name}"),
        ]
    )


def _leave_quietly() -> None:
    """Nobody reads our output any more: point it nowhere, so that the interpreter's last flush does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
