"""`tunedeck eval`: scores a run's checkpoints, or a model, on held-out data.

Try: `tunedeck eval last --checkpoint all`
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.importing import importing
from engine.commands.options import JsonOption, OverridesOption, RunsOption, find_result_run
from engine.commands.output import make_console, print_json, print_progress
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.evaluate.scores import Scores
    from engine.journal.directory import RunDirectory
    from engine.spec.schema.run import RunSpec


SHOWN_CHARACTERS = 80
"""The length to which prompts and answers are cut on a screen; --json has all of each."""


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run, or with -r a hub id or folder.")],
    checkpoint: Annotated[
        str | None, typer.Option(metavar="STEP|best|all", help="Which checkpoints; by default the newest.")
    ] = None,
    profile: Annotated[str | None, typer.Option("-p", "--profile", help="With MODEL: the hardware profile.")] = None,
    recipe: Annotated[
        str | None, typer.Option("-r", "--recipe", help="With MODEL: the recipe whose validation data are used.")
    ] = None,
    overrides: OverridesOption = None,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Score a run's checkpoints, or a model, on held-out data. Scores are loss, perplexity and exact match."""
    from engine.launch.training_packages import require_training_packages
    from engine.spec.load import load_run_spec

    require_training_packages()
    if profile or recipe or overrides:
        profile, recipe = _both_files(target, profile, recipe, checkpoint)
        results = _score(spec_for_model(target, recipe, profile, overrides or []))
    else:
        place = _find_run(target, runs)
        results = _score(load_run_spec(place.run_toml, own=True), place, checkpoint)
    if as_json:
        print_json([_as_json(step, scores) for step, scores in results], indent=None)
    else:
        _print(results)


def _both_files(target: str, profile: str | None, recipe: str | None, checkpoint: str | None) -> tuple[str, str]:
    """The profile and the recipe with which the model `target` is scored. Raises UsageError if one of them is missing,
    or if `checkpoint` is given, because only a run has checkpoints."""
    model = f"tunedeck eval {shlex.quote(target)} -p {profile or 'demo'} -r {recipe or 'demo'}"
    if profile is None or recipe is None:
        missing = [option for option, given in (("-p PROFILE", profile), ("-r RECIPE", recipe)) if given is None]
        raise UsageError(
            f"missing: {' and '.join(missing)}",
            expected="both with a MODEL; none, and no --set, with a RUN, which is scored with its own settings",
            fix=model,
        )
    if checkpoint is not None:
        raise UsageError("--checkpoint is for a RUN, and -p and -r say that a model is scored", fix=model)
    return profile, recipe


def _find_run(target: str, runs: Path | None) -> RunDirectory:
    """The run to score. Raises UsageError, which names -p and -r if the target could be a model."""
    try:
        return find_result_run(target, runs)
    except UsageError as error:
        if not target.startswith("builtin:") and target.count("/") != 1 and not Path(target, "config.json").is_file():
            raise
        raise UsageError(
            f"{target!r} is not a run; to score a model, -p PROFILE and -r RECIPE are missing",
            fix=f"tunedeck eval {shlex.quote(target)} -p demo -r demo",
        ) from error


def _score(
    spec: RunSpec, place: RunDirectory | None = None, checkpoint: str | None = None
) -> list[tuple[int | None, Scores]]:
    """Score the chosen checkpoints of the run in `place`, or without one the model of `spec`, in this process."""
    from engine.launch.environment import set_device_environment

    set_device_environment(spec)
    with importing():
        from engine.evaluate.run import score_model, score_run
        from engine.model.library_output import silence_libraries

    silence_libraries()
    if place is None:
        return [(None, score_model(spec, print_progress))]
    return list(score_run(place, checkpoint, print_progress))


def spec_for_model(model: str, recipe: str, profile: str, overrides: list[str]) -> RunSpec:
    """Resolve the run spec for scoring `model` (hub id, folder, builtin:NAME) on a recipe's data.

    The recipe's settings for its own model are reset: adapter and revision, and unless `model` is built-in, random
    weights and tokenizer. The user's `overrides` are applied last.
    """
    from engine.spec.load import resolve

    chosen = str(Path(model).absolute()) if Path(model).is_dir() else model
    own = ["model.adapter=", "model.revision="]
    if not model.startswith("builtin:"):
        own += ["model.init=", "model.tokenizer="]
    return resolve(profile, recipe, [*own, f"model.id={json.dumps(chosen)}", *overrides]).spec


def _as_json(step: int | None, scores: Scores) -> dict[str, Any]:
    found = {"metrics": scores.metrics, "count": scores.count, "samples": scores.samples, "notes": scores.notes}
    return {"step": step, **found}


def _print(results: list[tuple[int | None, Scores]]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = make_console()
    names = list(results[0][1].metrics)
    table = Table("step", *names, "samples", box=None)
    for step, scores in results:
        values = [f"{scores.metrics[name]:.4f}" for name in names]
        table.add_row("-" if step is None else str(step), *values, str(scores.count))
    console.print(table)
    for note in results[-1][1].notes:
        console.print(note, soft_wrap=True)
    for sample in results[-1][1].samples:
        # Text, not str: what a model writes must not be parsed as markup.
        prompt, answer, reference = (_short(sample[key]) for key in ("prompt", "answer", "reference"))
        console.print(Text(f"{prompt} -> {answer} (reference {reference})"), soft_wrap=True)


def _short(text: str) -> str:
    """Quote the text on one line, with control characters escaped, and cut in the middle if it is long."""
    shown = repr(text)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS // 2]}...{shown[-16:]}"
