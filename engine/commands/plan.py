"""`tunedeck plan` and `tunedeck fit`: what a run will hold in memory, and the cheapest changes that make it fit.

Printing only; the figures are `engine.budget`'s. `--json` prints one document, in bytes.

Try: `tunedeck plan -p demo -r demo`, `tunedeck fit -p 24gb -r full --json`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.options import JsonOption, ProfileOption, RecipeOption, SetOption

if TYPE_CHECKING:
    from engine.budget.advice import Advice, Suggestion
    from engine.budget.plan import Plan
    from engine.spec.run import RunSpec

ExactOption = Annotated[
    bool, typer.Option("--exact", help="Simulate the engine's own step instead of the closed form.")
]
WriteOption = Annotated[
    Path | None, typer.Option("--write", metavar="FILE", help="Save the recipe with the first suggestion applied.")
]
BAR_CELLS = 70
LETTERS = {
    "weights": "w", "adapters": "d", "gradients": "g", "optimizer": "o", "activations": "a", "recompute": "r",
    "loss": "l", "buffers": "b", "workspace": "k", "context": "c", "fragmentation": "f",
}
"""Components as letters of the bar."""
HEADS = {
    "weights": "weight", "adapters": "adapt", "gradients": "grad", "optimizer": "optim", "activations": "activ",
    "recompute": "recomp", "loss": "loss", "buffers": "buffer",
}
"""Components as column heads, short enough for 80 columns."""
VERDICTS = {
    "fits": "fits",
    "tight": "tight: only with a smaller micro-batch or a remedy",
    "does_not_fit": "does not fit: not even one sequence with every remedy",
}


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
) -> None:
    """Say what a run will hold in memory, phase by phase. Exit code 3 when it does not fit."""
    from engine.budget.plan import make_plan

    spec = _resolve(profile, recipe, sets)
    if exact:
        _warn(spec, simulated=True)
        _exactly(spec, as_json)
        return
    planned = make_plan(spec)
    _warn(spec)
    if as_json:
        typer.echo(json.dumps(planned.as_json(), indent=2))
    else:
        _print_plan(planned, spec)
    if planned.verdict == "does_not_fit":
        raise typer.Exit(3)


def _warn(spec: RunSpec, *, simulated: bool = False) -> None:
    """Print what preflight has to say; of an architecture that can only be simulated it knows nothing."""
    from engine.budget.lookup import find_architecture
    from engine.budget.preflight import warnings_of
    from engine.errors import UnknownArchitectureError

    try:
        arch = find_architecture(spec)
    except UnknownArchitectureError:
        if simulated:
            return
        raise
    for warning in warnings_of(arch, spec):
        sys.stderr.write(f"tunedeck: {warning}\n")


def _exactly(spec: RunSpec, as_json: bool) -> None:
    """Print the simulated plan; exit code 3 when it does not fit."""
    from engine.model.quiet import without_chatter
    from engine.simulate.plan import exact_plan
    from engine.spec.text import visible

    without_chatter()
    found = exact_plan(spec)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        typer.echo(f"{visible(spec.recipe.model.id)}: the engine's own step, simulated; nothing was allocated\n")
        for phase, peak_bytes in found.simulation.phases.items():
            mark = "*" if phase == found.simulation.deciding_phase else " "
            typer.echo(f"{mark}{phase:16}{_mib(peak_bytes):>12}")
        typer.echo("")
        for component, held_bytes in {**found.simulation.components, **found.beside}.items():
            typer.echo(f" {component:16}{_mib(held_bytes):>12}")
        typer.echo(f"\n{found.verdict.replace('_', ' ')}: {_mib(found.device_bytes)} of "
                   f"{_mib(found.capacity_bytes)}, {_mib(found.margin_bytes)} left")
        typer.echo(f"micro-batch {found.micro_batch} x {found.length} tokens, {found.accumulation} per optimizer step")
        if found.closed_form_bytes is not None:
            off = 100 * (found.closed_form_bytes / found.simulation.peak_bytes - 1)
            typer.echo(f"the closed form says {_mib(found.closed_form_bytes)} ({off:+.2f} %)")
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
    from engine.budget.advice import advise

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
    from engine.budget.hub import bring_config
    from engine.budget.preflight import refuse_unsafe
    from engine.spec.later import refuse_unbuilt
    from engine.spec.load import resolve

    resolved = resolve(profile, recipe, sets or ())
    for notice in resolved.notices:
        sys.stderr.write(f"tunedeck: {notice}\n")
    refuse_unbuilt(resolved.spec, planning=True)
    for notice in bring_config(resolved.spec):
        sys.stderr.write(f"tunedeck: {notice}\n")
    refuse_unsafe(resolved.spec)
    return resolved.spec


def _write(advice: Advice, recipe: str, sets: list[str], target: Path) -> None:
    """Save the recipe with the first suggestion. Raises UsageError when there is none."""
    from engine.errors import UsageError
    from engine.spec.rewrite import rewritten
    from engine.spec.share import write_new

    chosen = [*advice.suggestions, *advice.room][:1]
    if not chosen:
        raise UsageError("there is no suggestion to write", fix="run fit without --write to see the plan")
    changes = {key: after for key, (_, after) in chosen[0].changes.items()}
    write_new(target, rewritten("recipe", recipe, sets, changes, target).encode(), force=False)


def _print_plan(planned: Plan, spec: RunSpec) -> None:
    """The bar, the table, the sentence."""
    typer.echo(f"{spec.recipe.model.id}, recipe {spec.recipe.name} on profile {_device_name(spec, planned)}")
    for line in [*_bar(planned), "", *_table(planned), "", *_sentences(planned), *_residuals(spec)]:
        typer.echo(line)


def _residuals(spec: RunSpec) -> list[str]:
    """Where the figures for what torch does not allocate come from."""
    from engine.budget.calibration import residuals_for

    if spec.profile.device.kind != "cuda":
        return []
    if residuals_for(spec.profile) is None:
        return ["context, workspace and fragmentation are typical values; the first run on this machine measures them"]
    return ["context, workspace and fragmentation as runs on this machine had them"]


def _device_name(spec: RunSpec, planned: Plan) -> str:
    return f"{spec.profile.name} (simulated device)" if planned.simulated else spec.profile.name


def _bar(planned: Plan) -> list[str]:
    """What is used of the capacity, a letter per component, and what the letters mean. "!" marks the capacity."""
    used = {name: size for name, size in planned.prediction.components.items() if size}
    scale = BAR_CELLS / max(planned.capacity_bytes, planned.prediction.device_bytes)
    filled = "".join(LETTERS[name] * round(size * scale) for name, size in used.items())
    cells = list(f"{filled:.<{BAR_CELLS}}"[:BAR_CELLS])
    if planned.margin_bytes < 0:
        cells[min(round(planned.capacity_bytes * scale), BAR_CELLS - 1)] = "!"
    share = 100 * planned.prediction.device_bytes / planned.capacity_bytes
    return [f"[{''.join(cells)}] {share:.0f} %", "  ".join(f"{LETTERS[name]} {name}" for name in used)]


def _table(planned: Plan) -> list[str]:
    """Rows are phases, columns the components that occur; what the device holds beside tensors is the same in each."""
    phases, deciding = planned.prediction.phases, planned.prediction.deciding_phase
    names = [name for name in HEADS if any(parts.get(name) for parts in phases.values())]
    large = planned.peak_bytes >= 2**30
    unit, digits = (2**30, 2) if large else (2**20, 1)
    head = [f"{'GiB' if large else 'MiB':<19}", *(HEADS[name] for name in names), "total"]
    rows = [head]
    for phase, parts in phases.items():
        sizes = [parts.get(name, 0) for name in names]
        cells = [f"{size / unit:.{digits}f}" if size else "" for size in [*sizes, sum(parts.values())]]
        rows.append([f"{'*' if phase == deciding else ' '}{phase:<18}", *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return [" ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _sentences(planned: Plan) -> list[str]:
    """Verdict, margin, how the batch is cut, and the remedy where there is one."""
    used, capacity = planned.prediction.device_bytes, planned.capacity_bytes
    over = "left" if planned.margin_bytes >= 0 else "missing"
    lines = [
        f"{VERDICTS[planned.verdict]}; {planned.prediction.deciding_phase} decides (*)",
        f"{_mib(used)} of {_mib(capacity)}, {_mib(abs(planned.margin_bytes))} {over}"
        + (f"; {_mib(planned.peak_bytes)} are torch's tensors" if used != planned.peak_bytes else ""),
        f"micro-batch {planned.micro_batch} × {planned.length} tokens, {planned.accumulation} per optimizer step",
    ]
    if planned.image_tokens:
        lines.append(f"each sequence with an image of {planned.image_tokens} tokens, the largest that is kept")
    if planned.ranks > 1:
        lines.append(f"for each of {planned.ranks} devices")
    if planned.remedies:
        changes = ", ".join(f"{key} = {value!r}" for key, value in planned.remedies.items())
        lines.append(f"fits with {changes}; what is learned stays the same")
    if planned.verdict == "does_not_fit":
        lines.append("see what would help: tunedeck fit with the same arguments")
    return lines


def _print_advice(advice: Advice, spec: RunSpec, written: Path | None) -> None:
    """The plan in a line, then the suggestions as diffs."""
    typer.echo(f"{spec.recipe.model.id}, recipe {spec.recipe.name} on profile {_device_name(spec, advice.plan)}")
    for line in _sentences(advice.plan)[:2]:
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
    slower = sum(lever.slower_percent for lever in suggestion.levers)
    speed = f"about {abs(slower):.0f} % {'slower' if slower > 0 else 'faster'}" if slower else "same speed"
    learning = ", CHANGES WHAT IS LEARNED" if suggestion.changes_learning else ""
    plan = suggestion.plan
    lines = [
        f"{index}. {_mib(plan.prediction.device_bytes)}, {_mib(plan.margin_bytes)} left, "
        f"micro-batch {plan.micro_batch}, {speed}{learning}"
    ]
    for key, (before, after) in suggestion.changes.items():
        lines += [f"   - {key} = {_toml(before)}", f"   + {key} = {_toml(after)}"]
    return lines + [f"     {lever.note}" for lever in suggestion.levers]


def _toml(value: Any) -> str:
    """A value as it stands in a recipe."""
    import tomlkit

    return tomlkit.item(value).as_string() if value is not None else "(not set)"


def _mib(size: int) -> str:
    """Bytes for a reader: MiB below 10 GiB, else GiB."""
    return f"{size / 2**20:,.1f} MiB" if abs(size) < 10 * 2**30 else f"{size / 2**30:,.2f} GiB"
