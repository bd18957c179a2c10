"""From a checked run spec to a run directory that an engine can be started on: refuse, plan, write, note.

Shared by `train`, `queue add` and the console, so it is light. Starting the engine is `engine.launch.process`'s affair.

Try: `tunedeck queue add -p demo -r demo`
"""

from __future__ import annotations

from pathlib import Path

from engine.budget.advise.plan import Plan, make_plan
from engine.budget.advise.preflight import free_bytes, refuse_unsafe, warnings_of
from engine.budget.architecture.lookup import find_architecture
from engine.budget.predict.shards import require_shards
from engine.errors import ConfigNotHereError, DoesNotFitError, UnknownArchitectureError, UsageError
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.files import write_atomically
from engine.journal.index import record_start, recorded_runs
from engine.spec.check.unsupported import refuse_unsupported
from engine.spec.load import dump_run_spec, load_run_spec
from engine.spec.schema.run import Limits, RunSpec


def create_run(
    spec: RunSpec, folder: Path, *, force: bool = False, launched: bool = False
) -> tuple[RunDirectory, list[str]]:
    """Plan the run and make its directory in `folder`; returns it with notices for the user. Only where a launcher has
    started a process for each device (`launched`) may the profile name several machines.

    Raises:
        UsageError: the spec asks for what this version does not do, or for what would train wrongly.
        DoesNotFitError: one sequence with every remedy exceeds the capacity, unless `force`.
        EnvironmentProblem: the folder cannot be written, or torch is too old for sharded weights.
    """
    if not launched:
        require_launcher(spec)
    plan, notices = checked_plan(spec, folder, force=force)
    if spec.profile.parallel.strategy == "sharded":
        require_shards()
    directory = create_run_directory(folder, spec.name, dump_run_spec(spec), plan.as_json() if plan is not None else {})
    warning = record_start(directory)
    return directory, [*notices, *([warning] if warning else [])]


def checked_plan(spec: RunSpec, folder: Path, *, force: bool) -> tuple[Plan | None, list[str]]:
    """The plan of a run whose directory would be in `folder`, and notices; None where nothing can be predicted.

    Raises UsageError and DoesNotFitError, as `create_run_directory` does.
    """
    refuse_unsupported(spec)
    refuse_unsafe(spec)
    notices: list[str] = []
    plan: Plan | None = None
    try:
        plan = make_plan(spec)
        notices += warnings_of(find_architecture(spec), spec, free_disk_bytes=free_bytes(folder))
    except (UnknownArchitectureError, ConfigNotHereError) as unknown:
        # Any causal model may be trained: the engine plans again once it has the config, or learns what fits.
        notices.append(f"no plan before the start: {unknown.found}")
    if plan is not None and plan.verdict == "does_not_fit" and not force:
        raise _does_not_fit(plan)
    return plan, notices


def require_launcher(spec: RunSpec) -> None:
    """Raise UsageError for a profile of several machines: nothing here starts processes on another one."""
    machines = spec.profile.nodes.count
    if machines > 1:
        raise UsageError(
            f"profile {spec.profile.name!r} has {machines} machines, and this command runs on one",
            fix="write a script that starts it on all of them: tunedeck launch with the same -p and -r",
        )


def drop_untrusted_limits(directory: RunDirectory) -> str | None:
    """Take the limits out of a run that this user did not start on this machine; a notice for the user, or None.

    To be called before a run is gone on with: a run directory from elsewhere could bring a command to run when it ends,
    or allow code that comes with a model.
    """
    spec = load_run_spec(directory.run_toml, own=True)
    here = directory.path.resolve()
    if spec.limits == Limits() or any(run.path.resolve() == here for run in recorded_runs()):
        return None
    write_atomically(directory.run_toml, dump_run_spec(spec.model_copy(update={"limits": Limits()})))
    return (
        "this run was not started by you on this machine: its limits (--on-finish, --max-hours, --devices, --wait, "
        "--trust-remote-code) are left out; give them again if you want them"
    )


def _does_not_fit(plan: Plan) -> DoesNotFitError:
    return DoesNotFitError(
        f"this does not fit: it needs {(plan.capacity_bytes - plan.margin_bytes) / 2**30:.3g} GiB "
        f"of {plan.capacity_bytes / 2**30:.3g} GiB, and even one sequence with every remedy needs too much",
        fix="see what takes it: tunedeck plan with the same arguments; --force trains anyway",
    )
