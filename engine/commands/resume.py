"""`tunedeck resume`: going on with a run, as it was or with what may change about it.

Which changes a run can take is `engine.commands.changes`.

Try: `tunedeck resume last`
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.importing import importing
from engine.commands.options import JsonOption, RunArgument, RunsOption, SetOption, runs_folder
from engine.commands.train import (
    Detach,
    Devices,
    MaxHours,
    OnFinish,
    Profile,
    Trust,
    Wait,
    check_launcher_rank,
    print_notices,
)
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory
    from engine.launch.launcher_rank import LauncherRank
    from engine.spec.schema.run import RunSpec

FromStep = Annotated[int | None, typer.Option("--from", metavar="STEP", min=0, help="Go on from this checkpoint.")]


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(resume)


def resume(
    run: RunArgument,
    profile: Profile = None,
    sets: SetOption = None,
    from_step: FromStep = None,
    devices: Devices = None,
    wait: Wait = None,
    max_hours: MaxHours = None,
    on_finish: OnFinish = None,
    trust_remote_code: Trust = False,
    detach: Detach = False,
    json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Go on with a run that was paused, stopped or crashed, or make a finished one longer.

    --max-hours, --on-finish, --devices, --wait and --trust-remote-code stay as they were; 0 or "" takes one back.
    """
    from engine.commands.follow import start_and_follow
    from engine.journal.index import record_start, resolve_run
    from engine.journal.liveness import refuse_if_claimed
    from engine.launch.create_run import require_launcher
    from engine.launch.launcher_rank import find_launcher_rank
    from engine.spec.check.devices import parse_device_indices
    from engine.spec.load import load_run_spec, override

    given: dict[str, Any] = {
        "devices": None if devices is None else parse_device_indices(devices or None),
        "wait_seconds": wait,
        "max_hours": max_hours,
        "on_finish": on_finish,
        "trust_remote_code": trust_remote_code or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    directory = resolve_run(run, runs_folder(runs))

    def prepare() -> None:
        refuse_if_claimed(directory)
        _check_step(directory, from_step)
        print_notices(_respecify(directory, profile, sets or [], from_step, given))
        warning = record_start(directory)
        print_notices([warning] if warning else [])

    launcher_rank = find_launcher_rank()
    if launcher_rank is not None:
        spec = override(load_run_spec(directory.run_toml), sets or [], profile=profile).spec
        raise typer.Exit(_resume_launched(spec, launcher_rank, directory, prepare, from_step, detach, json))
    prepare()
    require_launcher(load_run_spec(directory.run_toml))
    start_and_follow(directory, resume=True, from_step=from_step, detach=detach, as_json=json)


def _resume_launched(
    spec: RunSpec,
    launcher_rank: LauncherRank,
    directory: RunDirectory,
    prepare: Callable[[], None],
    from_step: int | None,
    detach: bool,
    as_json: bool,
) -> int:
    """Be one rank of the run. Rank 0 alone prepares it, and only at the first start of the launcher's job."""
    with importing():
        from engine.train.external_launcher import Task, take_up, train_launched, worked_on

    def settle() -> Task:
        again = worked_on(launcher_rank, directory)
        if not again:
            prepare()
        return take_up(launcher_rank, directory, resume=True, from_step=None if again else from_step)

    check_launcher_rank(spec, launcher_rank, detach)
    return train_launched(spec, launcher_rank, settle, as_json=as_json)


def _check_step(directory: RunDirectory, step: int | None) -> None:
    """Raise UsageError when `--from` names a checkpoint that is not there."""
    if step is None or directory.checkpoint(step).is_dir():
        return
    there = [path.name.removeprefix("step-").lstrip("0") for path in sorted(directory.checkpoints.glob("step-*"))]
    raise UsageError(
        f"{directory.name} has no checkpoint of step {step}",
        expected=f"--from {' or '.join(there)}" if there else "a run that has written one",
        fix="leave --from out to go on from the newest",
    )


def _respecify(
    directory: RunDirectory, profile: str | None, sets: list[str], from_step: int | None, given: dict[str, Any]
) -> list[str]:
    """Write the changed spec into the run, keeping the old one. Returns what to tell the user. Raises UsageError.

    `given` are the limits named on this command line; all others are those of the last start.
    """
    from engine.commands.changes import aloud, changed, is_longer, refused
    from engine.journal.files import write_atomically
    from engine.spec.check.unsupported import refuse_unsupported
    from engine.spec.load import dump_run_spec, load_run_spec, override

    before = load_run_spec(directory.run_toml)
    resolved = override(before, sets, profile=profile)
    changes = changed(before.model_dump(by_alias=True), resolved.spec.model_dump(by_alias=True))
    problems = refused(changes)
    if problems:
        raise UsageError(
            "resume cannot change what the run has already learned from:\n  " + "\n  ".join(problems),
            fix="start a new run with: tunedeck train",
        )
    refuse_unsupported(resolved.spec)
    longer = is_longer(changes)
    if not longer and from_step is None:
        _refuse_when_done(directory)
    spec, notices = _with_limits(directory, resolved.spec, given)
    if changes:
        write_atomically(_next_backup(directory), directory.run_toml.read_text("utf-8"))
    if changes or spec.limits != load_run_spec(directory.run_toml, own=True).limits:
        write_atomically(directory.run_toml, dump_run_spec(spec))
    return [*resolved.notices, *notices, *aloud(changes), *_schedule_notice(spec, longer)]


def _refuse_when_done(directory: RunDirectory) -> None:
    from engine.journal.summary import summarise

    summary = summarise(directory)
    if summary.status == "done":
        raise UsageError(
            f"run {directory.name} is done at step {summary.step}",
            expected="a run that is not finished, or more epochs or max_steps than it had",
            fix=f"tunedeck resume {directory.name} --set train.max_steps={max(1, summary.step) * 2}",
        )


def _with_limits(directory: RunDirectory, spec: RunSpec, given: dict[str, Any]) -> tuple[RunSpec, list[str]]:
    """The spec with the limits of the last start and those given now; and what to tell the user."""
    from engine.launch.create_run import drop_untrusted_limits
    from engine.spec.check.devices import require_matching_devices
    from engine.spec.load import load_run_spec

    foreign = drop_untrusted_limits(directory)
    notices = [foreign] if foreign else []
    kept = load_run_spec(directory.run_toml, own=True).limits
    if kept.devices and "devices" not in given:
        try:
            require_matching_devices(spec.model_copy(update={"limits": kept}))
        except UsageError as error:
            notices.append(f"the devices of the last start are left out: {error.found}")
            kept = kept.model_copy(update={"devices": []})
    spec = spec.model_copy(update={"limits": kept.model_copy(update=given)})
    require_matching_devices(spec)
    return spec, notices


def _schedule_notice(spec: RunSpec, longer: bool) -> list[str]:
    if not longer:
        return []
    scheduler = spec.recipe.train.scheduler
    if scheduler == "constant":
        return ["the run gets longer; its learning rate is constant, so there is no schedule to recompute"]
    return [f"the run gets longer; the {scheduler} schedule is recomputed for the new number of steps"]


def _next_backup(directory: RunDirectory) -> Path:
    number = 1
    while (directory.path / f"run.{number}.toml").exists():
        number += 1
    return directory.path / f"run.{number}.toml"
