"""`tunedeck queue`: runs that wait for their turn, one after another, each its own process.

Try: `tunedeck queue add -p demo -r demo`, then `tunedeck queue start`
"""

from __future__ import annotations

import json as json_format
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.options import JsonOption, RunArgument, RunsOption, SetOption, runs_folder
from engine.commands.train import (
    Devices,
    Force,
    MaxHours,
    OnFinish,
    Profile,
    Recipe,
    RunName,
    RunSpecFile,
    Trust,
    Wait,
    print_notices,
    resolve_arguments,
)

if TYPE_CHECKING:
    from engine.journal.queue import Queue, QueueState
    from engine.journal.summary import RunSummary

WAIT_FOR_DEVICE_SECONDS = 24 * 3600.0
"""A queued run is there to wait: how long for a busy device, unless --wait says otherwise."""

POLL_SECONDS = 0.25

queue = typer.Typer(help="Runs that wait for their turn.", no_args_is_help=True)

First = Annotated[bool, typer.Option("--first", help="Put it before all others.")]
Position = Annotated[int, typer.Argument(min=1, help="Its new place, counted from 1.", show_default=False)]
Detach = Annotated[bool, typer.Option("--detach", help="Return at once; the queue is worked on without this terminal.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.add_typer(queue, name="queue")
    app.command("_keeper", hidden=True)(keeper)


@queue.command()
def add(
    profile: Profile = None,
    recipe: Recipe = None,
    sets: SetOption = None,
    name: RunName = None,
    devices: Devices = None,
    wait: Wait = None,
    force: Force = False,
    first: First = False,
    json: JsonOption = False,
    run_spec: RunSpecFile = None,
    trust_remote_code: Trust = False,
    max_hours: MaxHours = None,
    on_finish: OnFinish = None,
    runs: RunsOption = None,
) -> None:
    """Check and plan a run as `train` does, and put it at the end of the queue."""
    from engine.journal.queue import Queue
    from engine.launch.create_run import create_run

    resolved = resolve_arguments(
        profile, recipe, run_spec, sets or [], name,
        devices=devices, trust_remote_code=trust_remote_code, max_hours=max_hours, on_finish=on_finish,
        wait_seconds=WAIT_FOR_DEVICE_SECONDS if wait is None else wait,
    )  # fmt: skip
    print_notices(resolved.notices)
    folder = runs_folder(runs)
    directory, notices = create_run(resolved.spec, folder, force=force)
    print_notices(notices)
    order = Queue(folder).add(directory, first=first)
    place = order.waiting.index(directory.name) + 1
    if json:
        _print({"run": directory.name, "path": str(directory.path), "position": place})
        return
    hint = "" if order.keeper else "; begin with: tunedeck queue start"
    sys.stdout.write(f"{directory.name} is number {place} in the queue{hint}\n")


@queue.command("list")
def list_queue(json: JsonOption = False, runs: RunsOption = None) -> None:
    """Show what runs, what waits, and whether anybody works on the queue."""
    from engine.journal.queue import Queue

    waiting = Queue(runs_folder(runs))
    order = waiting.look()
    rows = _rows(waiting, order)
    if json:
        _print({"keeper": order.keeper.pid if order.keeper else None, "runs": rows})
        return
    for row in rows:
        place = "now" if row["position"] == 0 else str(row["position"])
        sys.stdout.write(f"{place:>4}  {row['status']:8}  {row['run']}  {row['profile']}  {row['recipe']}\n")
    sys.stderr.write(_state(order) + "\n")


@queue.command()
def remove(run: RunArgument, runs: RunsOption = None) -> None:
    """Take a waiting run out of the queue, and its folder into the trash of the runs folder."""
    from engine.journal.index import resolve_run
    from engine.journal.queue import Queue
    from engine.journal.trash import move_to_trash

    folder = runs_folder(runs)
    directory = resolve_run(run, folder)
    Queue(folder).remove(directory.name)
    sys.stdout.write(f"{directory.name} no longer waits; its folder is now {move_to_trash(directory)}\n")


@queue.command()
def move(run: RunArgument, position: Position, runs: RunsOption = None) -> None:
    """Give a waiting run another place."""
    from engine.journal.index import resolve_run
    from engine.journal.queue import Queue

    folder = runs_folder(runs)
    Queue(folder).move(resolve_run(run, folder).name, position)
    list_queue(runs=runs)


@queue.command()
def start(detach: Detach = False, runs: RunsOption = None) -> None:
    """Begin with the first run, then the next, until none waits; a run that fails does not stop the others.

    The queue is worked on by a process of its own: Ctrl-C leaves it going. Exits with the code of the first failure.
    """
    from engine.journal.queue import Queue
    from engine.launch.queue_worker import start_queue_worker

    folder = runs_folder(runs)
    waiting = Queue(folder)
    order = waiting.look()
    if order.keeper is None and not order.waiting:
        sys.stderr.write("the queue is empty; add a run with: tunedeck queue add\n")
        return
    pid = start_queue_worker(folder)
    if detach:
        sys.stdout.write(f"process {pid} works on the queue of {len(order.waiting)}; see: tunedeck queue list\n")
        return
    raise typer.Exit(_follow(waiting, pid))


@queue.command()
def stop(runs: RunsOption = None) -> None:
    """Start no further run. The present one goes on (`tunedeck stop` ends it)."""
    import os
    import signal

    from engine.journal.queue import Queue

    keeper = Queue(runs_folder(runs)).look().keeper
    if keeper is None:
        sys.stderr.write("nobody works on the queue\n")
        return
    os.kill(keeper.pid, signal.SIGTERM)
    sys.stdout.write("no further run is started; the present one goes on\n")


def keeper(folder: str) -> None:
    """The process behind `queue start`; never started by hand."""
    from pathlib import Path

    from engine.launch.queue_worker import run_queue

    run_queue(Path(folder))


def _follow(waiting: Queue, pid: int) -> int:
    """Print the beginning and the end of each run while the keeper lives; returns the first exit code but 0."""
    import time

    from engine.journal.directory import RunDirectory
    from engine.journal.liveness import identify
    from engine.journal.summary import summarise

    code, current = 0, None
    while True:
        alive = identify(pid) is not None  # looked at first, so that nothing written before its end is missed
        now = waiting.look().current
        if now != current and current is not None:
            summary = summarise(RunDirectory(waiting.runs_dir / current))
            sys.stdout.write(f"{current}: {_ending(summary)}\n")
            code = code or (summary.exit_code if summary.exit_code is not None else 1)
        if now != current and now is not None:
            sys.stdout.write(f"{now} begins; watch it: tunedeck watch {now}\n")
        sys.stdout.flush()
        current = now
        if not alive:
            return code
        time.sleep(POLL_SECONDS)


def _ending(summary: RunSummary) -> str:
    from engine.journal.event_text import clean

    error = clean((summary.last_error or "").splitlines()[0]) if summary.last_error else ""
    return f"{summary.status} at step {summary.step}" + (f": {error}" if error else "")


def _rows(waiting: Queue, order: QueueState) -> list[dict[str, Any]]:
    """The present run at position 0, then what waits, from 1."""
    from engine.journal.directory import RunDirectory
    from engine.journal.summary import summarise

    names = [(0, order.current)] if order.current and order.keeper else []
    rows = []
    for position, name in [*names, *enumerate(order.waiting, 1)]:
        summary = summarise(RunDirectory(waiting.runs_dir / str(name)))
        rows.append({
            "position": position, "run": summary.run, "path": summary.path, "status": summary.status,
            "model": summary.model, "profile": summary.profile, "recipe": summary.recipe,
        })  # fmt: skip
    return rows


def _state(order: QueueState) -> str:
    if order.keeper is not None:
        return f"process {order.keeper.pid} works on the queue; {len(order.waiting)} wait"
    if not order.waiting:
        return "the queue is empty"
    return f"{len(order.waiting)} wait and nobody works on them; begin with: tunedeck queue start"


def _print(document: Any) -> None:
    sys.stdout.write(json_format.dumps(document) + "\n")
