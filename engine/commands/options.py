"""Options and arguments that several commands share, each defined once, and functions that resolve their values.

The engine's modules are imported inside the functions, because `tunedeck --help` imports this file, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory

PROFILE_HELP = "Hardware profile: a name, or a path to a TOML file."
RECIPE_HELP = "Recipe: a name, or a path to a TOML file."

ProfileOption = Annotated[str, typer.Option("-p", "--profile", help=PROFILE_HELP, show_default=False)]
RecipeOption = Annotated[str, typer.Option("-r", "--recipe", help=RECIPE_HELP, show_default=False)]
OptionalProfile = Annotated[str | None, typer.Option("-p", "--profile", help=PROFILE_HELP)]
OptionalRecipe = Annotated[str | None, typer.Option("-r", "--recipe", help=RECIPE_HELP)]
OverridesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="K=V", help="Override one recipe key, such as train.learning_rate=1e-4.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
RunsOption = Annotated[
    Path | None,
    typer.Option(
        "--runs", metavar="DIR", help="Folder of runs (else $TUNEDECK_RUNS, else ./runs).", show_default=False
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A path, a run's name, a unique prefix, or 'last'.", show_default=False)
]
RunSpecOption = Annotated[
    Path | None, typer.Option("--run-spec", metavar="F", help="Repeat the run of this run.toml instead of -p and -r.")
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the run; by default the recipe's.")]
DevicesOption = Annotated[str | None, typer.Option("--devices", metavar="2,3", help="Indices of the devices to use.")]
WaitOption = Annotated[
    float | None, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait this long for a busy device.")
]
DetachOption = Annotated[bool, typer.Option("--detach", help="Return once the run has started.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Start as written even if the plan says it does not fit.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Allow code that comes with a hub model.")]
MaxHoursOption = Annotated[
    float | None, typer.Option("--max-hours", metavar="H", min=0, help="Write a checkpoint and stop after H hours.")
]
OnFinishOption = Annotated[
    str | None, typer.Option("--on-finish", metavar="CMD", help="Shell command to run when the run has ended.")
]


def runs_folder(given: Path | None) -> Path:
    """Return the absolute path of the folder of runs: `given` (the value of --runs), else $TUNEDECK_RUNS, else ./runs.
    """
    from engine.journal.index import runs_folder as find_folder

    return find_folder(given)


def find_result_run(run: str, runs: Path | None) -> RunDirectory:
    """Find the run that a RUN argument names; for a staged run, the stage whose result is the run's result.

    Raises UsageError if no run matches, several do, or that stage has not begun.
    """
    from engine.journal.stages import result_run

    return result_run(find_run(run, runs))


def find_run(run: str, runs: Path | None) -> RunDirectory:
    """Find the run that a RUN argument names. Raises UsageError if no run matches, or several do."""
    from engine.journal.index import resolve_run

    return resolve_run(run, runs_folder(runs))
