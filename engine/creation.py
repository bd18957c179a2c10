"""From a checked run spec to a run directory that an engine can be started on: refuse, plan, write, note.

Shared by `train`, `queue add` and the console, so it is light. Starting the engine is `engine.start`'s affair.

Try: `tunedeck queue add -p demo -r demo`
"""

from __future__ import annotations

from pathlib import Path

from engine.budget.plan import Plan, make_plan
from engine.errors import ConfigNotHereError, DoesNotFitError, UnknownArchitectureError
from engine.journal.directory import RunDirectory, create_run
from engine.journal.index import note_run
from engine.spec.later import refuse_unbuilt
from engine.spec.load import dump_run_spec
from engine.spec.run import RunSpec


def new_run(spec: RunSpec, folder: Path, *, force: bool = False) -> tuple[RunDirectory, list[str]]:
    """Plan the run and make its directory in `folder`; returns it with notices for the user.

    Raises:
        UsageError: the spec asks for what this version does not do.
        DoesNotFitError: one sequence with every remedy exceeds the capacity, unless `force`.
        EnvironmentProblem: the folder cannot be written.
    """
    refuse_unbuilt(spec)
    notices: list[str] = []
    plan: Plan | None = None
    try:
        plan = make_plan(spec)
    except (UnknownArchitectureError, ConfigNotHereError) as unknown:
        # Any causal model may be trained: the engine plans again once it has the config, or learns what fits.
        notices.append(f"no plan before the start: {unknown.found}")
    if plan is not None and plan.verdict == "does_not_fit" and not force:
        raise _does_not_fit(plan)
    directory = create_run(folder, spec.name, dump_run_spec(spec), plan.as_json() if plan is not None else {})
    warning = note_run(directory)
    return directory, [*notices, *([warning] if warning else [])]


def _does_not_fit(plan: Plan) -> DoesNotFitError:
    return DoesNotFitError(
        f"this does not fit: it needs {(plan.capacity_bytes - plan.margin_bytes) / 2**30:.3g} GiB "
        f"of {plan.capacity_bytes / 2**30:.3g} GiB, and even one sequence with every remedy needs too much",
        fix="see what takes it: tunedeck plan with the same arguments; --force trains anyway",
    )
