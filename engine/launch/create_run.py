"""Creates a run: resolves the arguments of a start to a run spec, checks and plans the run, and makes its directory.

Shared by `train`, `queue add`, `launch` and the console. Starting the engine is in `engine.launch.process`.

Try: `tunedeck queue add -p demo -r demo`
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.budget.advise.plan import Plan, make_plan
from engine.budget.advise.preflight import (
    free_bytes,
    notes_on_experts,
    refuse_unsafe,
    refuse_untrusted_code,
    warnings_of,
)
from engine.budget.advise.staged_plan import StagePlan, disk_warnings, make_staged_plan
from engine.budget.advise.strategy import settle_parallel
from engine.budget.architecture.lookup import find_architecture
from engine.budget.predict.shards import require_shards
from engine.errors import ConfigNotHereError, DoesNotFitError, UnknownArchitectureError, UsageError
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.files import write_atomically
from engine.journal.index import record_start, recorded_runs
from engine.launch.require_device import require_device
from engine.launch.require_hub import require_hub
from engine.launch.simulation import with_simulations
from engine.launch.training_packages import require_training_packages
from engine.spec.check.devices import parse_device_indices, require_launcher, require_matching_devices
from engine.spec.check.unsupported import refuse_unsupported
from engine.spec.files.data_files import require_data_files
from engine.spec.load import Resolved, dump_run_spec, load_run_spec, override, resolve
from engine.spec.schema.run import Limits, RunSpec
from engine.trackers.packages import require_trackers


def command_line_limits(
    max_hours: float | None,
    wait_seconds: float | None,
    on_finish: str | None,
    devices: str | None,
    trust_remote_code: bool,
) -> Limits:
    """Make the [limits] table of a run spec from the options --max-hours, --wait (`wait_seconds`), --on-finish,
    --devices and --trust-remote-code. They are stored with the run and apply again when it is resumed. Raises
    UsageError for bad device indices."""
    return Limits(
        max_hours=max_hours,
        wait_seconds=wait_seconds,
        on_finish=on_finish,
        devices=parse_device_indices(devices),
        trust_remote_code=trust_remote_code,
    )


def resolve_start(
    profile: str | None,
    recipe: str | None,
    overrides: Sequence[str],
    *,
    run_spec: Path | None,
    name: str | None,
    limits: Limits,
) -> Resolved:
    """Resolve the run spec of a start: from a profile and a recipe, or from `run_spec`, the run.toml of an earlier run.
    `overrides` are KEY=VALUE, `name` replaces the recipe's name, `limits` become the [limits] table.

    Raises UsageError for arguments that do not go together, and SpecError for every problem of the files.
    """
    if run_spec is not None and recipe:
        raise UsageError("--run-spec and -r were both given", expected="one of them", fix="leave one out")
    if run_spec is not None:
        resolved = override(load_run_spec(run_spec), overrides, profile=profile, name=name, limits=limits)
    elif not profile or not recipe:
        missing = [text for text, given in (("-p PROFILE", profile), ("-r RECIPE", recipe)) if not given]
        raise UsageError(
            f"missing: {' and '.join(missing)}",
            expected="a profile and a recipe, or --run-spec FILE",
            fix="tunedeck train -p demo -r demo",
        )
    else:
        resolved = resolve(profile, recipe, overrides, name=name, limits=limits)
    require_matching_devices(resolved.spec)
    return resolved


def fetch_config(spec: RunSpec) -> tuple[list[str], bool]:
    """Fetch the model's config, which the plan needs, unless it is on this machine; returns notices for the user, and
    whether the hub was asked and did not answer. Raises TunedeckError if the hub answers and refuses."""
    from engine.budget.architecture.hub import bring_config

    try:
        return bring_config(spec), False
    except ConfigNotHereError:
        return [], True


def create_run(
    spec: RunSpec,
    folder: Path,
    *,
    force: bool = False,
    launched: bool = False,
    queued: bool = False,
    hub_checked: bool = False,
) -> tuple[RunDirectory, list[str]]:
    """Plan the run and create its directory in `folder`; returns the directory and notices for the user.

    `launched`: a launcher has started a process for each device; only then may the profile have several machines.
    `queued`: the run starts later, so its device and the files of its data need not exist yet. `force`: the run starts
    as it is written, whatever the plan says. `hub_checked`: the caller has called `require_hub`.

    May send requests to the hub, for the model's config and to see whether the rest can be fetched, and waits up to 15
    s for a hub that does not answer. A screen calls this in a thread.

    Raises:
        UsageError: the spec needs a feature that this version lacks, or would train wrongly, or parallel.sequence is
            "auto" and there is no plan to decide it.
        DoesNotFitError: one sequence with every remedy exceeds the capacity, unless `force`.
        DataError: files of the data do not exist.
        EnvironmentProblem: the folder cannot be written, packages for training or trackers are missing, torch is too
            old for sharded weights, the profile's GPUs do not exist, or the model or data of the hub are neither on
            this machine nor can be fetched.
    """
    require_training_packages()
    require_trackers(spec.recipe)
    refuse_sweep(spec)
    if not launched:
        require_launcher(spec)
    fetched, unreachable = fetch_config(spec)
    spec, settled = settle_parallel(spec)
    if spec.profile.parallel.strategy == "sharded":
        require_shards()
    plan, notices = _checked_plans(spec, folder, force=force, with_data=not queued)
    notices = [*fetched, *settled, *notices]
    if not queued:
        require_device(spec)
    if not hub_checked:
        require_hub([spec], unreachable=unreachable)
    if force:
        spec = spec.model_copy(update={"limits": spec.limits.model_copy(update={"as_written": True})})
    directory = create_run_directory(folder, spec.name, dump_run_spec(spec), plan)
    warning = record_start(directory)
    return directory, [*notices, *([warning] if warning else [])]


def _checked_plans(
    spec: RunSpec, folder: Path, *, force: bool, with_data: bool
) -> tuple[dict[str, Any], list[str]]:
    """Check and plan a run, or each stage of a staged one; returns the document of plan.json and notices. Files of the
    data must exist if `with_data`; with `force`, a run that does not fit is accepted. Raises the errors of
    `create_run`."""
    if not spec.recipe.stages:
        plan, notices = checked_plan(spec, folder, force=force)
        if with_data:
            require_data_files(spec.recipe)
        return plan.as_json() if plan is not None else {}, notices
    notices = []
    staged = with_simulations(lambda: make_staged_plan(spec), notices.append)
    for stage in staged.stages:
        if stage.kind == "train":
            _, found = checked_plan(stage.spec, folder, force=force)
            if with_data:
                require_data_files(stage.spec.recipe)
            notices += [f"stage {stage.name}: {notice}" for notice in found]
        elif stage.verdict == "does_not_fit" and not force:
            raise _hidden_router_does_not_fit(stage)
    notices += disk_warnings(staged, free_bytes(folder))
    return staged.as_json(), list(dict.fromkeys(notices))


def checked_plan(spec: RunSpec, folder: Path, *, force: bool) -> tuple[Plan | None, list[str]]:
    """Check and plan a run whose directory would be in `folder`; returns the plan and notices for the user.

    The plan is None where memory cannot be predicted. Raises SpecError or UsageError for what this version cannot train
    or the user has not allowed, such as a model's own code; and, unless `force`, DoesNotFitError if the run does not
    fit.
    """
    refuse_unsupported(spec)
    refuse_unsafe(spec)
    refuse_untrusted_code(spec)
    notices = notes_on_experts(spec)
    plan: Plan | None = None
    try:
        plan = with_simulations(lambda: make_plan(spec), notices.append)
        if plan.predictor == "closed_form":
            notices += warnings_of(find_architecture(spec), spec, free_disk_bytes=free_bytes(folder))
    except (UnknownArchitectureError, ConfigNotHereError) as unknown:
        # Any causal model may be trained: the engine plans again once it has the config, or learns what fits.
        notices.append(f"no plan before the start: {unknown.found}")
    if plan is not None and plan.verdict == "does_not_fit" and not force:
        raise _does_not_fit(plan, spec)
    return plan, notices


def refuse_sweep(spec: RunSpec) -> None:
    """Raise UsageError for a recipe with a sweep, where a single run is created."""
    if spec.recipe.sweep:
        raise UsageError(
            f"recipe {spec.recipe.name!r} has a [sweep], which is many runs",
            expected="one run, or a command that starts all of them",
            fix="tunedeck train or tunedeck queue add; --set sweep= leaves the sweep out",
        )


def drop_untrusted_limits(directory: RunDirectory) -> str | None:
    """Remove the limits (stored options such as --devices and --on-finish) from a run that this user did not start on
    this machine; returns a notice if any were removed.

    Must be called before a run is continued: the limits in a run directory from someone else could contain a shell
    command (`on_finish`), or allow code that comes with a model.
    """
    spec = load_run_spec(directory.run_toml, own=True)
    path = directory.path.resolve()
    if spec.limits == Limits() or any(run.path.resolve() == path for run in recorded_runs()):
        return None
    write_atomically(directory.run_toml, dump_run_spec(spec.model_copy(update={"limits": Limits()})))
    return (
        "this run was not started by you on this machine: its limits (--on-finish, --max-hours, --devices, --wait, "
        "--force, --trust-remote-code) are left out; give them again if you want them"
    )


def _hidden_router_does_not_fit(stage: StagePlan) -> DoesNotFitError:
    capacity = stage.spec.profile.device.capacity_bytes / 2**30
    return DoesNotFitError(
        f'stage {stage.name} does not fit: router = "hidden" runs the recipe\'s model, which needs '
        f"{(stage.peak_bytes or 0) / 2**30:.3g} GiB of {capacity:.3g} GiB",
        fix=f"--set stages.{stage.name}.router=random, or a smaller data.max_length; --force trains anyway",
    )


def _does_not_fit(plan: Plan, spec: RunSpec) -> DoesNotFitError:
    what = f"stage {spec.name.partition('/')[2]}" if "/" in spec.name else "the run"
    profile, recipe = (
        label.removeprefix("shipped:") for label in (spec.provenance.profile_file, spec.provenance.recipe_file)
    )
    overrides = [part for text in spec.provenance.set_ for part in ("--set", text)]
    fit = shlex.join(["tunedeck", "fit", "-p", profile, "-r", recipe, *overrides])
    return DoesNotFitError(
        f"{what} does not fit: it needs {(plan.capacity_bytes - plan.margin_bytes) / 2**30:.3g} GiB "
        f"of {plan.capacity_bytes / 2**30:.3g} GiB, and even one sequence with every remedy needs too much",
        fix=f"{fit}; --force trains anyway",
    )
