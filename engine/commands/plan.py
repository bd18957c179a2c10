"""`tunedeck plan` and `tunedeck advise`: how much memory a run needs, and the cheapest changes that make it fit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.shared import (
    JsonOption,
    OverridesOption,
    ProfileOption,
    RecipeOption,
    RunsOption,
    importing,
    print_json,
    print_line,
    print_notices,
    print_progress,
    runs_folder,
)
from engine.errors import DoesNotFitError

if TYPE_CHECKING:
    from engine.budget.advise.auto_settings import Choice
    from engine.budget.advise.plan import Plan
    from engine.budget.advise.search import Advice, Suggestion
    from engine.budget.advise.staged_plan import StagedPlan
    from engine.checks.run import CheckedRun
    from engine.config.schema.run import RunSpec

ExactOption = Annotated[
    bool, typer.Option("--exact", help="Simulate a training step instead of using the memory formula.")
]
EvaluationOption = Annotated[
    bool, typer.Option("--eval", help="Plan tunedeck eval after training instead: the loss pass and generation.")
]
WhyOption = Annotated[
    bool,
    typer.Option("--why", help="List the micro-batch sizes and numbers of recomputed layers that were considered."),
]
WriteOption = Annotated[
    Path | None, typer.Option("--write", metavar="FILE", help="Save the recipe with the first suggestion applied.")
]


StageOption = Annotated[
    str | None, typer.Option("--stage", metavar="NAME", help="Show only this stage of a recipe with stages, in full.")
]


def plan(
    profile: ProfileOption,
    recipe: RecipeOption,
    overrides: OverridesOption = None,
    stage: StageOption = None,
    exact: ExactOption = False,
    evaluation: EvaluationOption = False,
    why: WhyOption = False,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Predict how much memory a run needs, phase by phase. Exit code 3 when it does not fit."""
    from engine.budget.advise.plan import considered, make_plan
    from engine.errors import UsageError
    from engine.launch.other_processes import with_simulations

    points = _checked(profile, recipe, overrides or [], runs_folder(runs))
    if _are_of_sweep(points) and not evaluation:
        _report(points)
        _plan_sweep(points, as_json=as_json)
        return
    run = _worst(points)
    if evaluation:
        stage = stage or _last_trained(run.spec)
    if run.spec.recipe.stages and stage is None:
        if exact:
            raise UsageError("--exact simulates one stage", fix=f"name it: --stage {run.spec.recipe.stages[0].name}")
        _report(points)
        _plan_stages(run, as_json=as_json)
        return
    spec, facts = _of_stage(run.spec, stage), run.facts
    of_model = facts.of(spec.recipe.model)
    if evaluation:
        _plan_evaluation(spec, as_json=as_json)
        return
    _report(points)
    if exact:
        _exactly(spec, as_json)
        return
    planned = with_simulations(lambda: make_plan(spec, facts=of_model), print_progress)
    others = considered(spec, planned, of_model) if why else []
    if as_json:
        print_json(planned.as_json() | ({"considered": [each._asdict() for each in others]} if why else {}))
    else:
        _print_plan(planned, spec)
        if why:
            _print_why(others, planned, spec)
    if planned.verdict == "does_not_fit":
        raise typer.Exit(DoesNotFitError.exit_code)


def _last_trained(spec: RunSpec) -> str | None:
    """The stage whose result is the run's; None for a recipe without stages."""
    from engine.config.stages import enabled_stages

    trained = [stage.name for _, stage in enabled_stages(spec.recipe) if stage.kind == "train"]
    return trained[-1] if trained else None


def _plan_evaluation(spec: RunSpec, *, as_json: bool) -> None:
    """Print the memory of `tunedeck eval`. Exits with code 3 when it does not fit."""
    from engine.budget.advise.plan_evaluation import plan_evaluation
    from engine.commands import plan_text as text

    planned = plan_evaluation(spec)
    if as_json:
        print_json(planned.as_json())
    else:
        print_line("\n".join(text.evaluation_lines(planned, spec, shutil.get_terminal_size().columns)))
    if not planned.fits:
        raise typer.Exit(DoesNotFitError.exit_code)


def _are_of_sweep(points: list[CheckedRun]) -> bool:
    return any(point.spec.provenance.sweep is not None for point in points)


def _plan_sweep(points: list[CheckedRun], *, as_json: bool) -> None:
    """Print a line for each point of a sweep (a combination of its values), and the name of the point with the least
    memory left. Exits with code 3 when a point does not fit."""
    from engine.journal.event_text import describe_verdict

    plans = [(point.name, planned, _memory_left(planned)) for point, planned in _planned(points)]
    if as_json:
        print_json({"points": [{"name": name, "plan": planned.as_json()} for name, planned, _ in plans]})
    else:
        for name, planned, left in plans:
            memory = f"{left / 2**30:.2f} GiB left" if left is not None else ""
            print_line(f"{describe_verdict(planned.verdict):<14} {memory:>16}  {name}")
        known = {name: left for name, _, left in plans if left is not None}
        if known:
            print_line(f"the least memory is left with {min(known, key=known.__getitem__)}")
    if any(planned.verdict == "does_not_fit" for _, planned, _ in plans):
        raise typer.Exit(DoesNotFitError.exit_code)


def _planned(points: list[CheckedRun]) -> list[tuple[RunSpec, Plan | StagedPlan]]:
    """Return (run spec, plan) of every point of a sweep."""
    from engine.budget.advise.plan import make_plan
    from engine.budget.advise.staged_plan import make_staged_plan
    from engine.launch.other_processes import with_simulations

    def plan_of(point: CheckedRun) -> Plan | StagedPlan:
        if point.spec.recipe.stages:
            return make_staged_plan(point.spec, point.facts)
        return make_plan(point.spec, facts=point.facts.of(point.spec.recipe.model))

    plans = with_simulations(lambda: [plan_of(point) for point in points], print_progress)
    return list(zip((point.spec for point in points), plans, strict=True))


def _memory_left(planned: Plan | StagedPlan) -> int | None:
    """Bytes at the peak, of a staged run in its largest stage; None if no stage has a plan."""
    from engine.budget.advise.plan import Plan

    worst = planned if isinstance(planned, Plan) else planned.worst.plan if planned.worst else None
    return worst.margin_bytes if worst is not None else None


def _worst(points: list[CheckedRun]) -> CheckedRun:
    """Return the point of a sweep with the least memory left, and print a notice that names it. Returns the first if
    no point has a plan, or if this is no sweep."""
    if not _are_of_sweep(points):
        return points[0]
    left_of = [_memory_left(planned) for _, planned in _planned(points)]
    known = [(left, point) for left, point in zip(left_of, points, strict=True) if left is not None]
    if not known:
        return points[0]
    _, worst = min(known, key=lambda row: row[0])
    print_notices([f"the point of the sweep with the least memory left: {worst.spec.name}"])
    return worst


def _of_stage(spec: RunSpec, name: str | None) -> RunSpec:
    """`spec` itself if `name` is None, else its stage. Raises UsageError if there is no such enabled stage."""
    from engine.budget.advise.staged_plan import planning_spec
    from engine.config.stages import enabled_stage

    return spec if name is None else planning_spec(spec, enabled_stage(spec.recipe, name))


def _plan_stages(run: CheckedRun, *, as_json: bool) -> None:
    """Print a line for each stage of a staged run, or with `as_json` one document. Exits with code 3 when a stage does
    not fit."""
    from engine.budget.advise.staged_plan import make_staged_plan
    from engine.commands import plan_text as text
    from engine.launch.other_processes import with_simulations

    planned = with_simulations(lambda: make_staged_plan(run.spec, run.facts), print_progress)
    if as_json:
        print_json(planned.as_json())
    else:
        print_line("\n".join(text.stage_lines(planned, run.spec, shutil.get_terminal_size().columns)))
    if planned.verdict == "does_not_fit":
        raise typer.Exit(DoesNotFitError.exit_code)


def _exactly(spec: RunSpec, as_json: bool) -> None:
    """`plan --exact`. Exits with code 3 when the run does not fit."""
    from engine.commands.plan_text import exact_lines

    with importing():
        from engine.extras.simulate.step import exact_plan
        from engine.model.config import silence_libraries

    silence_libraries()
    found = exact_plan(spec)
    if as_json:
        print_json(found.as_json())
    else:
        print_line("\n".join(exact_lines(found, spec, shutil.get_terminal_size().columns)))
    if found.verdict == "does_not_fit":
        raise typer.Exit(DoesNotFitError.exit_code)


def advise(
    profile: ProfileOption,
    recipe: RecipeOption,
    overrides: OverridesOption = None,
    stage: StageOption = None,
    as_json: JsonOption = False,
    write: WriteOption = None,
) -> None:
    """Rank changes that make a run fit, or use its spare memory. For a sweep, its largest run is used. Exit code 3 when
    no change makes it fit."""
    from engine.budget.advise import search
    from engine.errors import UsageError
    from engine.launch.other_processes import with_simulations

    points = _checked(profile, recipe, overrides or [])
    spec = _worst(points).spec
    if spec.recipe.stages and (stage is None or write is not None):
        name = spec.recipe.stages[0].name
        raise UsageError(
            "this recipe has stages, and advise handles one of them at a time",
            expected="--stage NAME, without --write",
            fix=f"add --stage {name}; apply a change with --set stages.{name}.KEY=VALUE",
        )
    spec = _of_stage(spec, stage)
    _report(points)
    advice = with_simulations(lambda: search.advise(spec), print_progress)
    if write is not None:
        _write(advice, recipe, overrides or [], write)
    if as_json:
        print_json(advice.as_json())
    else:
        _print_advice(advice, spec, write)
    if advice.plan.verdict == "does_not_fit" and not advice.suggestions:
        raise typer.Exit(DoesNotFitError.exit_code)


@wraps(advise)
def fit(**options: Any) -> None:
    """Old name of `advise`."""
    print_progress("tunedeck: fit has been renamed to advise: use tunedeck advise with the same arguments")
    advise(**options)


def _checked(profile: str, recipe: str, overrides: Sequence[str], folder: Path | None = None) -> list[CheckedRun]:
    """Resolve profile, recipe and overrides, and check them; returns the run, or every point of a sweep."""
    from engine.checks.run import PLAN, check_runs, require_all
    from engine.config.load import resolve

    resolved = resolve(profile, recipe, overrides)
    print_notices(resolved.notices)
    runs = check_runs(resolved.spec, PLAN, folder=folder)
    print_notices(dict.fromkeys(notice for run in runs for notice in run.notices))
    require_all(runs, next((run.unreachable for run in runs if run.unreachable is not None), None))
    return runs


def _report(runs: Sequence[CheckedRun]) -> None:
    """Print what was found and does not prevent a plan."""
    print_notices(dict.fromkeys(line for run in runs for line in run.reported))


def _write(advice: Advice, recipe: str, overrides: Sequence[str], target: Path) -> None:
    """Write the recipe with the first suggestion and the user's --set. Raises UsageError if there is no suggestion."""
    from engine.config.files.write import rewrite_text, write_new_file
    from engine.errors import UsageError

    chosen = [*advice.suggestions, *advice.room][:1]
    if not chosen:
        raise UsageError("there is no suggestion to write", fix="to see the plan, run advise without --write")
    changes = {key: after for key, (_, after) in chosen[0].changes.items()}
    write_new_file(target, rewrite_text("recipe", recipe, overrides, changes, target).encode(), force=False)


def _print_plan(planned: Plan, spec: RunSpec) -> None:
    from engine.commands import plan_text as text

    width = shutil.get_terminal_size().columns
    table = text.phase_table(planned.prediction.phases, planned.prediction.deciding_phase)
    above = [*text.wrap_lines([text.title(planned, spec)], width), *text.capacity_bar(planned, width)]
    below = text.wrap_lines([*text.summary_lines(planned, spec), *text.residual_lines(spec)], width)
    beside = text.beside_rows(planned)
    print_line("\n".join([*above, "", *table, "", *beside, *([""] if beside else []), *below]))


def _print_why(others: list[Choice], planned: Plan, spec: RunSpec) -> None:
    from engine.commands import plan_text as text

    for line in text.why_lines(others, planned, spec):
        print_line(line)


def _print_advice(advice: Advice, spec: RunSpec, written: Path | None) -> None:
    """A short plan, each suggestion as a diff of the recipe, and the path `written` of the first."""
    from engine.commands import plan_text as text

    width = shutil.get_terminal_size().columns
    for line in text.wrap_lines([text.title(advice.plan, spec), *text.summary_lines(advice.plan, spec)[:3]], width):
        print_line(line)
    if advice.plan.verdict == "fits":
        print_line("to use the remaining memory:" if advice.room else "no setting would use the remaining memory")
    elif not advice.suggestions:
        print_line("no combination of changes makes it fit: choose a smaller model or a larger device")
    for index, suggestion in enumerate([*advice.suggestions, *advice.room], 1):
        for line in _suggestion_lines(index, suggestion):
            print_line(line)
    if written is not None:
        print_line(f"written: {written}")


def _suggestion_lines(index: int, suggestion: Suggestion) -> list[str]:
    """Its memory and cost, then the recipe's lines before and after the change. `index` counts from 1."""
    from engine.commands.plan_text import format_size, host_sentence, toml_text

    plan, used = suggestion.plan, suggestion.plan.prediction.device_bytes
    lines = [
        f"{index}. {format_size(used, used)}, {format_size(plan.margin_bytes, used)} left"
        f"{' (tight)' if plan.is_tight else ''}, "
        f"micro-batch {plan.micro_batch}, {suggestion.summary}"
    ]
    if plan.host:
        lines.append(f"   {host_sentence(plan)}")
    for key, (before, after) in suggestion.changes.items():
        lines += [f"   - {key} = {toml_text(before)}", f"   + {key} = {toml_text(after)}"]
    return lines + [f"     {lever.note}" for lever in suggestion.levers]
