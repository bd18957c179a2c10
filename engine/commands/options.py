"""Options that several commands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ProfileOption = Annotated[
    str, typer.Option("-p", "--profile", help="Hardware profile: a name, or a path to a TOML file.", show_default=False)
]
RecipeOption = Annotated[
    str, typer.Option("-r", "--recipe", help="Recipe: a name, or a path to a TOML file.", show_default=False)
]
SetOption = Annotated[
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


def runs_folder(given: Path | None) -> Path:
    """The folder of runs: `--runs`, else $TUNEDECK_RUNS, else ./runs. Absolute."""
    from engine.journal.index import runs_folder as found

    return found(given)
