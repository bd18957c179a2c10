"""Commands of processes that Tunedeck starts itself: simulations, and the followers of a run."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import redirect_stdout
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.shared import RunArgument, RunsOption, find_run, importing, print_line, print_progress
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.config.schema.run import RunSpec
    from engine.journal.directory import RunDirectory


def simulate_process() -> None:
    """Simulate runs whose memory no formula predicts; started by other commands, never by hand."""
    from engine.budget.predict.simulated import keep_simulation
    from engine.config.schema.run import RunSpec

    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # a model's own code may print
        for line in sys.stdin:
            spec = RunSpec.model_validate(json.loads(line))
            keep_simulation(spec, simulation(spec))
            answers.write("done\n")
            answers.flush()


def simulation(spec: RunSpec) -> dict[str, Any]:
    """The JSON document to cache; of a run that would be refused the refusal (`refused`, or `adapter` if the adapter
    does not fit), of model code that cannot run on tensors without data the exception (`problem`). Raises
    EnvironmentProblem, such as for a hub that cannot be reached."""
    from engine.errors import AdapterError, EnvironmentProblem, TunedeckError

    with importing():
        from engine.extras.simulate.curves import simulate_curves
        from engine.model.config import silence_libraries

    silence_libraries()
    try:
        return simulate_curves(spec)
    except EnvironmentProblem:
        raise  # may be gone the next time
    except TunedeckError as refusal:
        key = "adapter" if isinstance(refusal, AdapterError) else "refused"
        return {key: {"found": refusal.found, "expected": refusal.expected, "fix": refusal.fix}}
    except Exception as error:  # noqa: BLE001  (the code of any model of transformers runs here)
        return {"problem": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


NICENESS = 10
"""Below the engine's priority: the engine needs the processors more."""

ToOption = Annotated[
    list[str] | None,
    typer.Option(
        "--to",
        metavar="TRACKER",
        help="tensorboard, wandb, trackio, mlflow or swanlab; by default those of the recipe.",
        show_default=False,
    ),
]


def sync(run: RunArgument, to: ToOption = None, runs: RunsOption = None) -> None:
    """Send an experiment tracker the events it does not have yet. A running run does this itself."""
    from engine.extras.trackers.follow import forward_all
    from engine.journal.stages import stage_directories

    directory = find_run(run, runs)
    names = to or _trackers_of(directory)
    for part in stage_directories(directory) or [directory]:
        for name in names:
            count = forward_all(part, name)
            print_line(f"{part.name}: {count} event{'s' * (count != 1)} sent to {name}")


@wraps(sync)
def forward(**options: Any) -> None:
    """Old name of `sync`."""
    print_progress("tunedeck: forward has been renamed to sync: use tunedeck sync with the same arguments")
    sync(**options)


def _trackers_of(directory: RunDirectory) -> list[str]:
    """Raises UsageError if there are none."""
    from engine.config.load import load_run_spec

    names: list[str] = list(dict.fromkeys(load_run_spec(directory.run_toml, own=True).recipe.trackers.use))
    if not names:
        raise UsageError(
            f"the recipe of {directory.name} does not set a tracker",
            expected="trackers.use in the recipe, or --to",
            fix=f"tunedeck sync {directory.name} --to tensorboard",
        )
    return names


def webhook_process(
    directory: Annotated[Path, typer.Argument()],
    engine: Annotated[int, typer.Option("--engine")],
    offset: Annotated[int, typer.Option("--from")],
) -> None:
    """Tell the recipe's webhook what happens to a run: started by the engine, never by hand."""
    from engine.journal.directory import HeldRunDirectory
    from engine.launch.destinations import tell_webhook

    _ignore_signals()
    raise typer.Exit(min(1, tell_webhook(HeldRunDirectory(directory), engine, offset)))


def tracker_process(
    directory: Annotated[Path, typer.Argument()],
    name: Annotated[str, typer.Argument()],
    engine: Annotated[int, typer.Option("--engine")],
    after: Annotated[int, typer.Option("--after")],
) -> None:
    """Forward a run to a tracker while its engine lives: started by the engine, never by hand."""
    from engine.extras.trackers.follow import follow_engine
    from engine.journal.directory import HeldRunDirectory

    _ignore_signals()
    os.nice(NICENESS)
    follow_engine(HeldRunDirectory(directory), name, engine, after)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what ends the engine ends this process after the last event
