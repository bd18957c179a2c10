"""`tunedeck resume`: continues a run, unchanged or with changed settings.

`engine.launch.resume_run` decides which settings may change, and writes them into the run.

Try: `tunedeck resume last`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.importing import importing
from engine.commands.options import (
    DetachOption,
    DevicesOption,
    JsonOption,
    MaxHoursOption,
    OnFinishOption,
    OptionalProfile,
    OverridesOption,
    RunArgument,
    RunsOption,
    TrustOption,
    WaitOption,
    find_run,
)
from engine.commands.output import print_notices

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory
    from engine.launch.launcher_rank import LauncherRank
    from engine.spec.schema.run import RunSpec

FromStageOption = Annotated[
    str | None,
    typer.Option("--from-stage", metavar="NAME", help="Do this stage, and all that start from it, again."),
]
FromOption = Annotated[int | None, typer.Option("--from", metavar="STEP", min=0, help="Continue from this checkpoint.")]


def resume(
    run: RunArgument,
    profile: OptionalProfile = None,
    overrides: OverridesOption = None,
    from_step: FromOption = None,
    from_stage: FromStageOption = None,
    devices: DevicesOption = None,
    wait: WaitOption = None,
    max_hours: MaxHoursOption = None,
    on_finish: OnFinishOption = None,
    trust_remote_code: TrustOption = False,
    detach: DetachOption = False,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Continue a paused, stopped or crashed run, or make one longer.

    --max-hours, --on-finish, --devices, --wait and --trust-remote-code stay as they were; 0 or "" removes one.
    """
    from engine.commands.follow import start_and_follow
    from engine.launch.launcher_rank import find_launcher_rank, require_launchable
    from engine.launch.resume_run import prepare_resume
    from engine.spec.check.devices import parse_device_indices, require_launcher
    from engine.spec.load import load_run_spec, override

    given: dict[str, Any] = {
        "devices": None if devices is None else parse_device_indices(devices or None),
        "wait_seconds": wait,
        "max_hours": max_hours,
        "on_finish": on_finish,
        "trust_remote_code": trust_remote_code or None,
    }
    limits = {name: value for name, value in given.items() if value is not None}
    directory = find_run(run, runs)

    def prepare() -> None:
        notices = prepare_resume(
            directory, overrides or [], limits, profile=profile, from_step=from_step, from_stage=from_stage
        )
        print_notices(notices)

    launcher_rank = find_launcher_rank()
    if launcher_rank is None:
        require_launcher(override(load_run_spec(directory.run_toml), overrides or [], profile=profile).spec)
        prepare()
        start_and_follow(directory, resume=True, from_step=from_step, detach=detach, as_json=as_json)
        return
    spec = override(load_run_spec(directory.run_toml), overrides or [], profile=profile).spec
    require_launchable(spec, launcher_rank, detach=detach)
    raise typer.Exit(_resume_as_rank(spec, launcher_rank, directory, prepare, from_step, as_json))


def _resume_as_rank(
    spec: RunSpec,
    launcher_rank: LauncherRank,
    directory: RunDirectory,
    prepare: Callable[[], None],
    from_step: int | None,
    as_json: bool,
) -> int:
    """Train as one rank of the resumed run, from its checkpoint of `from_step` or its newest; returns the exit code.
    `prepare` checks and writes the changed spec: it is called on rank 0 only, and only at the first start of the
    launcher's job, not when the launcher restarts the ranks."""
    from engine.launch.environment import set_device_environment

    set_device_environment(spec)
    with importing():
        from engine.train.external_launcher import Task, take_up, train_launched, worked_on

    def settle() -> Task:
        restarted = worked_on(launcher_rank, directory)
        if not restarted:
            prepare()
        return take_up(launcher_rank, directory, resume=True, from_step=None if restarted else from_step)

    return train_launched(spec, launcher_rank, settle, as_json=as_json)
