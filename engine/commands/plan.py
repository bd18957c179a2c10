"""`tunedeck plan` and `tunedeck fit`: what a run will hold in memory, and the cheapest changes that make it fit.

Printing only; the figures are `engine.budget`'s. `--json` prints one document, in bytes.

Try: `tunedeck plan -p demo -r demo`, `tunedeck fit -p 24gb -r full --json`
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.importing import importing
from engine.commands.options import JsonOption, ProfileOption, RecipeOption, RunsOption, SetOption, runs_folder

if TYPE_CHECKING:
    from engine.budget.advise.fit import Advice, Suggestion
    from engine.budget.advise.plan import Plan
    from engine.spec.schema.run import RunSpec

ExactOption = Annotated[
    bool, typer.Option("--exact", help="Simulate the engine's own step instead of the closed form.")
]
WriteOption = Annotated[
    Path | None, typer.Option("--write", metavar="FILE", help="Save the recipe with the first suggestion applied.")
]
def register(app: typer.Typer) -> None:
    """Add `plan` and `fit`."""
    app.command()(plan)
    app.command()(fit)


def plan(
    profile: ProfileOption,
    recipe: RecipeOption,
    sets: SetOption = None,
    exact: ExactOption = False,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Say what a run will hold in memory, phase by phase. Exit code 3 when it does not fit."""
    from engine.budget.advise.plan import make_plan

    spec = _resolve(profile, recipe, sets)
    if exact:
        _warn(spec, runs, simulated=True)
        _exactly(spec, as_json)
        return
    planned = make_plan(spec)
    _warn(spec, runs)
    if as_json:
        typer.echo(json.dumps(planned.as_json(), indent=2))
    else:
        _print_plan(planned, spec)
    if planned.verdict == "does_not_fit":
        raise typer.Exit(3)


def _warn(spec: RunSpec, runs: Path | None, *, simulated: bool = False) -> None:
    """Print what preflight has to say; of an architecture that can only be simulated it knows nothing."""
    from engine.budget.advise.preflight import free_bytes, warnings_of
    from engine.budget.architecture.lookup import find_architecture
    from engine.errors import UnknownArchitectureError

    try:
        arch = find_architecture(spec)
    except UnknownArchitectureError:
        if simulated:
            return
        raise
    for warning in warnings_of(arch, spec, free_disk_bytes=free_bytes(runs_folder(runs))):
        sys.stderr.write(f"tunedeck: {warning}\n")


def _exactly(spec: RunSpec, as_json: bool) -> None:
    """Print the simulated plan; exit code 3 when it does not fit."""
    from engine.commands.exact_plan_text import exact_lines

    with importing():
        from engine.model.library_output import silence_libraries
        from engine.simulate.plan import exact_plan

    silence_libraries()
    found = exact_plan(spec)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        typer.echo("\n".join(exact_lines(found, spec, shutil.get_terminal_size().columns)))
    if found.verdict == "does_not_fit":
        raise typer.Exit(3)


def fit(
    profile: ProfileOption,
    recipe: RecipeOption,
    sets: SetOption = None,
    as_json: JsonOption = False,
    write: WriteOption = None,
) -> None:
    """Rank the changes that make a run fit, or say what the room left could buy. Exit code 3 when nothing helps."""
    from engine.budget.advise.fit import advise

    spec = _resolve(profile, recipe, sets)
    advice = advise(spec)
    if write is not None:
        _write(advice, recipe, sets or [], write)
    if as_json:
        typer.echo(json.dumps(advice.as_json(), indent=2))
    else:
        _print_advice(advice, spec, write)
    if advice.plan.verdict == "does_not_fit" and not advice.suggestions:
        raise typer.Exit(3)


def _resolve(profile: str, recipe: str, sets: list[str] | None) -> RunSpec:
    """The run spec; what this version cannot do is refused as `train` would, but for several devices."""
    from engine.budget.advise.preflight import refuse_unsafe
    from engine.budget.architecture.hub import bring_config
    from engine.spec.check.unsupported import refuse_unsupported
    from engine.spec.load import resolve

    resolved = resolve(profile, recipe, sets or ())
    for notice in resolved.notices:
        sys.stderr.write(f"tunedeck: {notice}\n")
    refuse_unsupported(resolved.spec, planning=True)
    for notice in bring_config(resolved.spec):
        sys.stderr.write(f"tunedeck: {notice}\n")
    refuse_unsafe(resolved.spec)
    return resolved.spec


def _write(advice: Advice, recipe: str, sets: list[str], target: Path) -> None:
    """Save the recipe with the first suggestion. Raises UsageError when there is none."""
    from engine.errors import UsageError
    from engine.spec.files.rewrite import rewrite_text
    from engine.spec.files.share import write_new_file

    chosen = [*advice.suggestions, *advice.room][:1]
    if not chosen:
        raise UsageError("there is no suggestion to write", fix="run fit without --write to see the plan")
    changes = {key: after for key, (_, after) in chosen[0].changes.items()}
    write_new_file(target, rewrite_text("recipe", recipe, sets, changes, target).encode(), force=False)


def _print_plan(planned: Plan, spec: RunSpec) -> None:
    """The bar, the table, the sentences."""
    from engine.commands import plan_text as words

    width = shutil.get_terminal_size().columns
    table = words.phase_table(planned.prediction.phases, planned.prediction.deciding_phase)
    above = [*words.wrap_lines([words.title(planned, spec)], width), *words.capacity_bar(planned, width)]
    below = words.wrap_lines([*words.summary_lines(planned, spec), *words.residual_lines(spec)], width)
    typer.echo("\n".join([*above, "", *table, "", *below]))


def _print_advice(advice: Advice, spec: RunSpec, written: Path | None) -> None:
    """The plan in a line, then the suggestions as diffs."""
    from engine.commands import plan_text as words

    width = shutil.get_terminal_size().columns
    for line in words.wrap_lines([words.title(advice.plan, spec), *words.summary_lines(advice.plan, spec)[:3]], width):
        typer.echo(line)
    if advice.plan.verdict == "fits":
        typer.echo("with the room left:" if advice.room else "nothing larger fits")
    elif not advice.suggestions:
        typer.echo("no combination of changes makes it fit: choose a smaller model or a larger device")
    for index, suggestion in enumerate([*advice.suggestions, *advice.room], 1):
        for line in _suggestion_lines(index, suggestion):
            typer.echo(line)
    if written is not None:
        typer.echo(f"written: {written}")


def _suggestion_lines(index: int, suggestion: Suggestion) -> list[str]:
    """One suggestion: what it costs, then the recipe's lines before and after."""
    from engine.commands.plan_text import format_size, toml_text

    slower = sum(lever.slower_percent for lever in suggestion.levers)
    speed = f"about {abs(slower):.0f} % {'slower' if slower > 0 else 'faster'}" if slower else "same speed"
    learning = ", CHANGES WHAT IS LEARNED" if suggestion.changes_learning else ""
    plan = suggestion.plan
    lines = [
        f"{index}. {format_size(plan.prediction.device_bytes, plan.capacity_bytes)}, "
        f"{format_size(plan.margin_bytes, plan.capacity_bytes)} left, "
        f"micro-batch {plan.micro_batch}, {speed}{learning}"
    ]
    for key, (before, after) in suggestion.changes.items():
        lines += [f"   - {key} = {toml_text(before)}", f"   + {key} = {toml_text(after)}"]
    return lines + [f"     {lever.note}" for lever in suggestion.levers]
