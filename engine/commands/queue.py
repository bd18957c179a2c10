"""`tunedeck queue`: runs that wait for their turn (`engine.journal.queue`) and are started one after another
(`engine.launch.queue_worker`)."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.shared import (
    JsonOption,
    RunArgument,
    RunsOption,
    find_run,
    print_json,
    print_line,
    print_notices,
    print_progress,
    runs_folder,
    takes_start_options,
)
from engine.launch.start_options import QUEUED_WAIT_SECONDS, StartOptions

if TYPE_CHECKING:
    from engine.config.load import Resolved
    from engine.journal.queue import Queue, QueueState

queue = typer.Typer(help="Run several runs one after another.", no_args_is_help=True)

FirstOption = Annotated[bool, typer.Option("--first", help="Put it first.")]
PositionArgument = Annotated[int, typer.Argument(min=1, help="Its new position, counted from 1.", show_default=False)]
DetachOption = Annotated[bool, typer.Option("--detach", help="Return at once; the queue runs without this terminal.")]


@queue.command()
@takes_start_options(
    "profile", "recipe", "overrides", "name", "devices", "wait", "force", "first", "as_json", "run_spec",
    "trust_remote_code", "max_hours", "on_finish", "runs",
)  # fmt: skip
def add(options: StartOptions, first: FirstOption = False) -> None:
    """Put a run at the end of the queue. It is checked and planned first, as by `train`."""
    from engine.launch.create_run import queue_run, resolve_start

    wait = QUEUED_WAIT_SECONDS if options.wait is None else options.wait
    resolved = resolve_start(replace(options, wait=wait))
    print_notices(resolved.notices)
    folder = runs_folder(options.runs)
    if resolved.spec.recipe.sweep:
        add_sweep(resolved, options, first=first)
        return
    directory, state, notices = queue_run(resolved.spec, folder, force=options.force, first=first)
    print_notices(notices)
    position = state.waiting.index(directory.name) + 1
    if options.as_json:
        print_json({"run": directory.name, "path": str(directory.path), "position": position}, indent=None)
        return
    hint = "" if state.worker else "; start the queue with: tunedeck queue start"
    print_line(f"{directory.name} is number {position} in the queue{hint}")


def add_sweep(resolved: Resolved, options: StartOptions, *, first: bool = False) -> list[str]:
    """Create a run for every point of a sweep and put them into the queue in their order, at its end or with `first` at
    its start; print their names and how to compare them; returns the names. With --force, points that do not fit are
    left out; otherwise they are an error."""
    from engine.config.load import load_run_spec
    from engine.launch.create_run import queue_sweep

    folder = runs_folder(options.runs)
    directories, notices = queue_sweep(resolved.spec, folder, force=options.force, first=first)
    print_notices(notices)
    sweep = load_run_spec(directories[0].run_toml).provenance.sweep if directories else None
    sweep_id = sweep.id if sweep is not None else ""
    if options.as_json:
        runs = [{"run": directory.name, "path": str(directory.path)} for directory in directories]
        print_json({"sweep": sweep_id, "runs": runs}, indent=None)
        return [directory.name for directory in directories]
    for directory in directories:
        print_line(directory.name)
    print_line(f"{len(directories)} runs are in the queue; compare them: tunedeck compare sweep:{sweep_id}")
    return [directory.name for directory in directories]


@queue.command("list")
def list_queue(as_json: JsonOption = False, runs: RunsOption = None) -> None:
    """Show the current and the waiting runs. Also whether the queue is started."""
    from engine.journal.queue import Queue

    waiting = Queue(runs_folder(runs))
    state = waiting.read()
    rows = _rows(waiting, state)
    if as_json:
        print_json({"worker": state.worker.pid if state.worker else None, "runs": rows}, indent=None)
        return
    for row in rows:
        position = "now" if row["position"] == 0 else str(row["position"])
        print_line(f"{position:>4}  {row['status']:8}  {row['run']}  {row['profile']}  {row['recipe']}")
    print_progress(_state_text(state))


@queue.command()
def remove(run: RunArgument, runs: RunsOption = None) -> None:
    """Take a waiting run out of the queue. Its folder goes to the trash of the runs folder."""
    from engine.journal.index import move_to_trash
    from engine.journal.queue import Queue

    directory = find_run(run, runs)
    Queue(runs_folder(runs)).remove(directory.name)
    print_line(f"{directory.name} was removed from the queue; its folder is now {move_to_trash(directory)}")


@queue.command()
def move(run: RunArgument, position: PositionArgument, runs: RunsOption = None) -> None:
    """Move a waiting run to another position."""
    from engine.journal.queue import Queue

    Queue(runs_folder(runs)).move(find_run(run, runs).name, position)
    list_queue(runs=runs)


@queue.command()
def start(detach: DetachOption = False, runs: RunsOption = None) -> None:
    """Start one run after another until none waits. A run that fails does not stop the others.

    The queue runs in the background: Ctrl-C does not stop it. Exits with the exit code of the first failed run.
    """
    from engine.journal.queue import Queue
    from engine.launch.queue_worker import follow_queue, start_queue_worker

    folder = runs_folder(runs)
    waiting = Queue(folder)
    state = waiting.read()
    if state.worker is None and not state.waiting:
        print_progress("the queue is empty; add a run with: tunedeck queue add")
        return
    if state.worker is not None:
        print_progress(f"the queue is already running (process {state.worker.pid})")
    pid = start_queue_worker(folder)
    if detach:
        print_line(f"process {pid} runs the queue of {len(state.waiting)}; see: tunedeck queue list")
        return
    code = 0
    for text, run_code in follow_queue(Queue.held(folder), pid, state.waiting):
        print_line(text)
        sys.stdout.flush()
        code = code or run_code
    raise typer.Exit(code)


@queue.command()
def stop(runs: RunsOption = None) -> None:
    """Do not start more runs. The current one continues (`tunedeck stop` ends it)."""
    from engine.journal.queue import Queue

    worker = Queue(runs_folder(runs)).read().worker
    if worker is None:
        print_progress("the queue is not running")
        return
    os.kill(worker.pid, signal.SIGTERM)
    print_line("no more runs will start; the current one continues")


def queue_worker(folder: str) -> None:
    """Be the process behind `queue start`; never started by hand."""
    from engine.launch.queue_worker import run_queue

    run_queue(Path(folder))


def _rows(waiting: Queue, state: QueueState) -> list[dict[str, Any]]:
    """The running one at position 0, then the waiting runs, counted from 1."""
    current = [(0, state.current)] if state.current and state.worker else []
    rows = []
    for position, name in [*current, *enumerate(state.waiting, 1)]:
        summary = waiting.summaries.of(waiting.run(name))
        fields = ("run", "path", "status", "model", "profile", "recipe")
        rows.append({"position": position, **{field: getattr(summary, field) for field in fields}})
    return rows


def _state_text(state: QueueState) -> str:
    if state.worker is not None:
        left = len(state.left_waiting)
        others = f", {left} of them until: tunedeck queue start" if left else ""
        return f"the queue is running (process {state.worker.pid}); {len(state.waiting)} waiting{others}"
    if not state.waiting:
        return "the queue is empty"
    return f"{len(state.waiting)} wait and the queue is not running; start it with: tunedeck queue start"
