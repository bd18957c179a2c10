"""Starts an engine for a command and shows its run until it ends: shared by `train` and `resume`.

The commands decide which run is started; how a process is followed is in `engine.launch.process`.

Try: `tunedeck train -p demo -r demo`, with and without `--json`, or piped into `head -3`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import typer

from engine.commands.output import print_json, print_notices, print_rows
from engine.commands.reporter import Reporter, make_reporter
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.journal.events import EventTail
from engine.journal.summary import summarise
from engine.journal.summary_text import next_steps, result_rows
from engine.launch.process import (
    DETACHED_CODE,
    POLL_SECONDS,
    FileOffsets,
    follow_engine,
    start_engine,
    wait_until_running,
)


def start_and_follow(
    directory: RunDirectory, *, resume: bool = False, from_step: int | None = None, detach: bool, as_json: bool
) -> None:
    """Start the engine on this run and show the run until it ends; with `detach`, return as soon as the engine runs.
    Raises typer.Exit with the engine's exit code. `resume`, `from_step`: see `start_engine`."""
    start = FileOffsets.of(directory)
    process = start_engine(directory, resume=resume, resume_from=from_step)
    if detach:
        wait_until_running(directory, process, start=start)
        _print_detached(directory, process, as_json)
        return
    reporter = make_reporter(summarise(directory), as_json=as_json)
    raise typer.Exit(_follow_with(reporter, directory, process, start, as_json))


def view_run(directory: RunDirectory, offset: int, *, as_json: bool) -> None:
    """Print the events of a run, from byte `offset` of `events.jsonl` on, until standard input is closed. Rank 0 of a
    job that a launcher started runs this in a process beside itself.

    The launcher's signals are meant for rank 0, so this process ignores signals and ends when its stdin is closed.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    reporter = make_reporter(summarise(directory), as_json=as_json)
    tail = EventTail(directory.events, offset=offset)
    ended = finished = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], POLL_SECONDS)[0])
        for event in tail.poll():
            finished = event["kind"] == "run_finished"
            reporter.event(event)
        reporter.tick()
    reporter.close()
    if finished:
        print_ending(directory, as_json=as_json)


def _follow_with(
    reporter: Reporter, directory: RunDirectory, process: subprocess.Popen[bytes], start: FileOffsets, as_json: bool
) -> int:
    try:
        code = follow_engine(
            directory,
            process,
            on_event=reporter.event,
            on_tick=reporter.tick,
            on_notice=reporter.notice,
            start=start,
        )
        if process.returncode is None:
            _silence_output()
            return DETACHED_CODE
    finally:
        if process.returncode is not None:
            reporter.close()
    print_ending(directory, as_json=as_json)
    return code


def print_ending(directory: RunDirectory, *, as_json: bool) -> None:
    """Print the table of results and the commands to type next, and on stderr the error that ended the run."""
    summary = summarise(directory)
    if not as_json:
        print_rows([*result_rows(summary), *next_steps(summary)])
    if summary.last_error:
        print_notices(["\n  ".join(map(clean, summary.last_error.splitlines()))])


def _print_detached(directory: RunDirectory, process: subprocess.Popen[bytes], as_json: bool) -> None:
    if as_json:
        print_json({"run": directory.name, "path": str(directory.path), "pid": process.pid}, indent=None)
        return
    print_rows(
        [
            ("running", directory.name),
            ("process", str(process.pid)),
            ("watch", f"tunedeck watch {directory.name}"),
            ("stop", f"tunedeck stop {directory.name}"),
        ]
    )


def _silence_output() -> None:
    """Point stdout and stderr at the null device: the process that read them is gone, and the interpreter's last
    flush would fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
