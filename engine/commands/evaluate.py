"""`tunedeck eval`: scores of a run's checkpoints, or of a model, on held-out data."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.importing import importing
from engine.commands.options import JsonOption, RunsOption, SetOption, runs_folder

if TYPE_CHECKING:
    from engine.evaluate.scores import Scores


SHOWN_CHARACTERS = 80
"""Of a prompt or an answer; --json has all of it."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("eval")(evaluate)


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run, or with -r a hub id or folder.")],
    checkpoint: Annotated[
        str | None, typer.Option(metavar="STEP|best|all", help="Which checkpoints; by default the newest.")
    ] = None,
    profile: Annotated[str | None, typer.Option("-p", "--profile", help="With MODEL: the hardware profile.")] = None,
    recipe: Annotated[str | None, typer.Option("-r", "--recipe", help="With MODEL: whose data to score on.")] = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Score a run's checkpoints, or a model, on held-out data: loss, perplexity, exact match."""
    from engine.errors import UsageError
    from engine.journal.index import resolve_run

    with importing():
        from engine.evaluate.run import score_model, score_run, spec_for_model
        from engine.model.library_output import silence_libraries

    silence_libraries()
    if recipe is not None:
        if checkpoint is not None or profile is None:
            raise UsageError("scoring a model needs -p PROFILE and -r RECIPE, and takes no --checkpoint")
        results: list[tuple[int | None, Scores]] = [
            (None, score_model(spec_for_model(target, recipe, profile, sets or []), _say))
        ]
    else:
        if sets or profile:
            raise UsageError("-p and --set go with -r RECIPE; a run is scored with its own settings")
        results = list(score_run(resolve_run(target, runs_folder(runs)), checkpoint, _say))
    if as_json:
        sys.stdout.write(json.dumps([_as_json(step, scores) for step, scores in results], ensure_ascii=False) + "\n")
    else:
        _print(results)


def _as_json(step: int | None, scores: Scores) -> dict[str, Any]:
    return {"step": step, "metrics": scores.metrics, "count": scores.count, "samples": scores.samples}


def _print(results: list[tuple[int | None, Scores]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    names = list(results[0][1].metrics)
    table = Table("step", *names, "samples", box=None)
    for step, scores in results:
        values = [f"{scores.metrics[name]:.4f}" for name in names]
        table.add_row("-" if step is None else str(step), *values, str(scores.count))
    console.print(table)
    for sample in results[-1][1].samples:
        # Text, never markup: what a model writes must not colour or move the screen.
        prompt, answer, reference = (_short(sample[key]) for key in ("prompt", "answer", "reference"))
        console.print(Text(f"{prompt} -> {answer} (reference {reference})"), soft_wrap=True)


def _short(text: str) -> str:
    """Text as it can be shown on a line: quoted, control characters escaped, cut in the middle."""
    shown = repr(text)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS // 2]}...{shown[-16:]}"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
