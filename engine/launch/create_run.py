"""Creates runs: resolves the arguments of a start to a run spec, checks and plans the run, and makes its directory. A
recipe's [sweep] becomes one ordinary run for each combination of its values."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from engine.budget.advise.plan import Plan, make_plan
from engine.budget.advise.preflight import free_bytes
from engine.budget.advise.staged_plan import RunFacts, StagePlan, disk_warnings, find_run_facts, make_staged_plan
from engine.checks import machine
from engine.checks.machine import own_profile, own_recipe
from engine.checks.rules import RUN_KEYS
from engine.checks.run import LAUNCHED, QUEUE, START, CheckedRun, Command, check_run
from engine.config.files.find import RUN_PREFIX, split_run_reference
from engine.config.files.trust import shared_folder_warning
from engine.config.load import Resolved, brings_limits, dump_run_spec, load_run_spec, override, resolve
from engine.config.schema.run import RunSpec
from engine.config.sweep import sweep_points
from engine.errors import ConfigNotHereError, DoesNotFitError, UnknownArchitectureError, UsageError
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.files import write_atomically
from engine.journal.index import record_start, resolve_run
from engine.journal.queue import Queue, QueueState
from engine.launch.destinations import allow_typed, notes_on_destinations
from engine.launch.other_processes import with_simulations
from engine.launch.start_options import StartOptions


def resolve_start(options: StartOptions) -> Resolved:
    """Resolve the run spec of a start: from a profile and a recipe, or from the run.toml of an earlier run.

    Raises UsageError for options that do not go together, and SpecError for every problem of the files.
    """
    profile, recipe, overrides = options.profile, options.recipe, options.overrides or ()
    limits, name = options.limits(), options.name
    if options.run_spec is not None and recipe:
        raise UsageError("--run-spec and -r exclude each other", expected="one of them", fix="leave out one of them")
    if options.run_spec is not None:
        spec = load_run_spec(options.run_spec)
        resolved = override(spec, overrides, profile=profile, name=name, limits=limits)
    elif not profile or not recipe:
        missing = [text for text, given in (("-p PROFILE", profile), ("-r RECIPE", recipe)) if not given]
        raise UsageError(
            f"missing: {' and '.join(missing)}",
            expected="a profile and a recipe, or --run-spec FILE",
            fix="add " + " ".join(_own_files(options)),
        )
    else:
        resolved = resolve(profile, recipe, overrides, name=name, limits=limits)
    allow_typed(resolved.spec.recipe.finish, overrides)
    return resolved


def _own_files(options: StartOptions) -> list[str]:
    profile = [] if options.profile else ["-p", own_profile() or "demo"]
    return profile + ([] if options.recipe else ["-r", own_recipe() or "demo"])


def pin_runs(spec: RunSpec) -> RunSpec:
    """The run spec with the full path of each run that it starts from: "run:last" means the run that is the last one
    now, and in this folder. Raises UsageError if there is no such run."""
    recipe = spec.recipe
    stages = [stage.model_copy(update={"model": _pinned(stage.model)}) for stage in recipe.stages]
    model = recipe.model.model_copy(update=_pinned({key: getattr(recipe.model, key) for key in RUN_KEYS}))
    return spec.model_copy(update={"recipe": recipe.model_copy(update={"model": model, "stages": stages})})


def _pinned(model: dict[str, Any]) -> dict[str, Any]:
    return {key: _with_path(value) if key in RUN_KEYS else value for key, value in model.items()}


def _with_path(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(RUN_PREFIX):
        return value
    name, which = split_run_reference(value)
    return f"{RUN_PREFIX}{resolve_run(name, None).path}" + (f"@{which}" if which else "")


@dataclass(frozen=True)
class PreparedRun:
    """A run that was checked and planned, and has no directory yet."""

    spec: RunSpec
    plan: dict[str, Any]
    """The document of plan.json."""
    notices: list[str]


def prepare_run(
    spec: RunSpec,
    folder: Path,
    *,
    force: bool = False,
    command: Command = START,
    hub_answers: Callable[[], bool] | None = None,
) -> PreparedRun:
    """Check and plan a run whose directory would be in `folder`; writes nothing. For the errors see `create_run`."""
    checked = check_run(spec, command, folder=folder, hub_answers=hub_answers)
    if any(finding.rule.level in ("error", "permission") for finding in checked.refused):
        checked.require()
    try:
        spec = pin_runs(checked.spec)
        plan, notices = _planned(replace(checked, spec=spec, facts=find_run_facts(spec)), folder, force=force)
    except DoesNotFitError as error:
        if checked.refused:
            checked.require(error)
        raise
    checked.require()
    if force:
        spec = spec.model_copy(update={"limits": spec.limits.model_copy(update={"as_written": True})})
    told = [*checked.notices, *checked.reported, *notices, *notes_on_destinations(spec.recipe.finish)]
    return PreparedRun(spec, plan, told)


def create_run(
    spec: RunSpec,
    folder: Path,
    *,
    force: bool = False,
    launched: bool = False,
) -> tuple[RunDirectory, list[str]]:
    """Plan the run and create its directory in `folder`; returns the directory and notices for the user.

    `launched`: a launcher has started a process for each device; only then may the profile have several machines.
    `force`: the run starts as it is written, whatever the plan says.

    May send requests to the hub, for the model's config and to see whether the rest can be fetched, and waits up to 15
    s for a hub that does not answer. A screen calls this in a thread.

    Raises:
        TunedeckError: a rule refuses the run (`engine.checks`), such as a wrong pattern, missing data, packages or
            GPUs, or a model that is neither here nor can be fetched.
        DoesNotFitError: one sequence with every remedy exceeds the capacity, unless `force`.
        EnvironmentProblem: the folder cannot be written.
    """
    return _create(prepare_run(spec, folder, force=force, command=LAUNCHED if launched else START), folder)


def _create(prepared: PreparedRun, folder: Path) -> tuple[RunDirectory, list[str]]:
    directory = create_run_directory(folder, prepared.spec.name, dump_run_spec(prepared.spec), prepared.plan)
    warning = record_start(directory)
    warnings = [warning, shared_folder_warning(folder)]
    return directory, [*prepared.notices, *(text for text in warnings if text)]


def _planned(run: CheckedRun, folder: Path, *, force: bool) -> tuple[dict[str, Any], list[str]]:
    """Plan a run, or each stage of a staged one; returns the document of plan.json and notices. With `force`, a run
    that does not fit is accepted. Raises the errors of `create_run`."""
    if not run.spec.recipe.stages:
        plan, notices = plan_checked(run.spec, run.facts, force=force)
        return plan.as_json() if plan is not None else {}, notices
    notices = []
    staged = with_simulations(lambda: make_staged_plan(run.spec, run.facts), notices.append)
    for stage in staged.stages:
        if stage.kind == "train":
            _, found = plan_checked(stage.spec, run.facts, force=force)
            notices += [f"stage {stage.name}: {notice}" for notice in found]
        elif stage.verdict == "does_not_fit" and not force:
            raise _hidden_router_does_not_fit(stage)
    notices += disk_warnings(staged, free_bytes(folder))
    return staged.as_json(), list(dict.fromkeys(notices))


def plan_checked(spec: RunSpec, facts: RunFacts, *, force: bool) -> tuple[Plan | None, list[str]]:
    """Plan a checked run, or one stage; returns the plan and notices for the user. The plan is None where memory cannot
    be predicted. Raises DoesNotFitError, unless `force`, if the run does not fit."""
    notices: list[str] = []
    plan: Plan | None = None
    try:
        plan = with_simulations(lambda: make_plan(spec, facts=facts.of(spec.recipe.model)), notices.append)
    except (UnknownArchitectureError, ConfigNotHereError) as unknown:
        # Any causal model may be trained: the engine plans again once it has the config, or learns what fits.
        notices.append(f"no memory plan before the start: {unknown.found}")
    if plan is not None and plan.verdict == "does_not_fit" and not force:
        raise _does_not_fit(plan, spec)
    return plan, notices


def drop_untrusted_limits(directory: RunDirectory) -> str | None:
    """Remove the limits of a run that this user did not start on this machine; returns a notice if there were any.

    Call it before a run is continued: limits from someone else could contain a shell command (`on_finish`), or allow
    code that comes with a model. Raises SpecError for a run.toml that no engine takes.
    """
    without_limits = load_run_spec(directory.run_toml)
    if not brings_limits(directory.run_toml):
        return None
    write_atomically(directory.run_toml, dump_run_spec(without_limits))
    return (
        "this run's limits and commands were not set by you on this machine, so --on-finish, --max-hours, "
        "--devices, --wait, --force and --trust-remote-code are left out; add them again if you want them"
    )


def _hidden_router_does_not_fit(stage: StagePlan) -> DoesNotFitError:
    capacity = stage.spec.profile.device.capacity_bytes / 2**30
    return DoesNotFitError(
        f'stage {stage.name} does not fit: router = "hidden" runs the recipe\'s model, which needs '
        f"{(stage.peak_bytes or 0) / 2**30:.3g} of {capacity:.3g} GiB",
        fix=f"--set stages.{stage.name}.router=random, or a smaller data.max_length; --force trains anyway",
    )


def _does_not_fit(plan: Plan, spec: RunSpec) -> DoesNotFitError:
    what = f"stage {spec.name.partition('/')[2]}" if "/" in spec.name else "the run"
    profile, recipe = (
        label.removeprefix("shipped:") for label in (spec.provenance.profile_file, spec.provenance.recipe_file)
    )
    overrides = [part for text in spec.provenance.set_ for part in ("--set", text)]
    stage = ["--stage", spec.name.partition("/")[2]] if "/" in spec.name else []
    advise = shlex.join(["tunedeck", "advise", "-p", profile, "-r", recipe, *stage, *overrides])
    return DoesNotFitError(
        f"{what} does not fit: it needs {(plan.capacity_bytes - plan.margin_bytes) / 2**30:.3g} of "
        f"{plan.capacity_bytes / 2**30:.3g} GiB, and with every remedy one sequence still needs too much",
        fix=f"{advise}; --force trains anyway",
    )


def queue_run(
    spec: RunSpec, folder: Path, *, force: bool = False, first: bool = False
) -> tuple[RunDirectory, QueueState, list[str]]:
    """Create a run as `create_run` does and put it into the queue of `folder`, both or neither; returns the run, the
    queue and notices for the user. Raises the errors of `create_run`, EnvironmentProblem if the queue cannot be
    written."""
    prepared = prepare_run(spec, folder, force=force, command=QUEUE)
    directories, state, notices = _create_in_queue([prepared], folder, first=first)
    return directories[0], state, notices


def queue_sweep(
    spec: RunSpec, folder: Path, *, force: bool = False, first: bool = False
) -> tuple[list[RunDirectory], list[str]]:
    """Check and plan all points, then create a run for each and put them into the queue of `folder`, all or none;
    returns the runs and notices for the user.

    Raises DoesNotFitError with every point that does not fit (with `force` those points are left out instead), and the
    errors of `queue_run`.
    """
    points = sweep_points(spec, force=force)
    fitting: list[PreparedRun] = []
    too_large: list[RunSpec] = []
    hub_answers = cache(machine.hub_answers)
    for point in points:
        try:
            fitting.append(prepare_run(point, folder, command=QUEUE, hub_answers=hub_answers))
        except DoesNotFitError:
            too_large.append(point)
    if too_large and not force:
        names = "\n  ".join(point.name for point in too_large)
        raise DoesNotFitError(
            f"{len(too_large)} of {len(points)} points of the sweep do not fit:\n  {names}",
            fix="--force starts the others; to see the plan of a point, pass its values to tunedeck plan with --set",
        )
    directories, _, notices = _create_in_queue(fitting, folder, first=first)
    return directories, list(dict.fromkeys(notices))


def _create_in_queue(
    prepared: Sequence[PreparedRun], folder: Path, *, first: bool
) -> tuple[list[RunDirectory], QueueState, list[str]]:
    """If one cannot be created or queued, none of them is left: nobody would start it, and it holds nothing yet."""
    directories: list[RunDirectory] = []
    notices: list[str] = []
    try:
        for run in prepared:
            directory, found = _create(run, folder)
            directories.append(directory)
            notices += found
        return directories, Queue(folder).add(*directories, first=first), notices
    except BaseException:
        for directory in directories:
            shutil.rmtree(directory.path, ignore_errors=True)
        raise
