"""`tunedeck train`, `tunedeck resume` and the hidden command that is the engine process itself.

Try: `tunedeck train -p demo -r demo`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.options import JsonOption, RunArgument, RunsOption, SetOption, runs_folder
from engine.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory
    from engine.spec.load import Resolved
    from engine.spec.run import RunSpec

Profile = Annotated[
    str | None, typer.Option("-p", "--profile", help="Hardware profile: a name, or a path to a TOML file.")
]
Recipe = Annotated[str | None, typer.Option("-r", "--recipe", help="Recipe: a name, or a path to a TOML file.")]
RunSpecFile = Annotated[
    Path | None, typer.Option("--run-spec", metavar="F", help="Repeat the run of this run.toml instead of -p and -r.")
]
RunName = Annotated[str | None, typer.Option("--name", help="Name of the run, else the recipe's.")]
Devices = Annotated[str | None, typer.Option("--devices", metavar="2,3", help="Indices of the devices to use.")]
Wait = Annotated[
    float | None, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait this long for a busy device.")
]
Detach = Annotated[bool, typer.Option("--detach", help="Return once the run has started.")]
Force = Annotated[bool, typer.Option("--force", help="Train even if the plan says that it does not fit.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow code that comes with a hub model.")]
MaxHours = Annotated[
    float | None, typer.Option("--max-hours", metavar="H", min=0, help="Write a checkpoint and stop after H hours.")
]
OnFinish = Annotated[
    str | None, typer.Option("--on-finish", metavar="CMD", help="Shell command run when the run has ended.")
]
FromStep = Annotated[int | None, typer.Option("--from", metavar="STEP", min=0, help="Go on from this checkpoint.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(train)
    app.command()(resume)
    app.command(name="_engine", hidden=True)(engine_process)


def train(
    profile: Profile = None,
    recipe: Recipe = None,
    sets: SetOption = None,
    name: RunName = None,
    devices: Devices = None,
    wait: Wait = None,
    detach: Detach = False,
    force: Force = False,
    json: JsonOption = False,
    run_spec: RunSpecFile = None,
    trust_remote_code: Trust = False,
    max_hours: MaxHours = None,
    on_finish: OnFinish = None,
    runs: RunsOption = None,
) -> None:
    """Train a recipe on a hardware profile: start the engine and follow it."""
    from engine.commands.follow import start_and_follow
    from engine.creation import new_run

    resolved = resolve_arguments(
        profile, recipe, run_spec, sets or [], name,
        devices=devices, trust_remote_code=trust_remote_code, max_hours=max_hours, on_finish=on_finish,
        wait_seconds=wait,
    )  # fmt: skip
    say(resolved.notices)
    directory, notices = new_run(resolved.spec, runs_folder(runs), force=force)
    say(notices)
    start_and_follow(directory, detach=detach, as_json=json)


def resolve_arguments(
    profile: str | None, recipe: str | None, run_spec: Path | None, sets: list[str], name: str | None, *,
    devices: str | None, trust_remote_code: bool, max_hours: float | None, on_finish: str | None,
    wait_seconds: float | None,
) -> Resolved:  # fmt: skip
    """The spec from -p and -r, or from an earlier run's file, with the limits of this start.

    Raises UsageError and what the spec raises.
    """
    from engine.spec.devices import check_devices, device_indices
    from engine.spec.load import Resolved, load_run_spec, override, resolve
    from engine.spec.run import Limits

    limits = Limits(
        max_hours=max_hours,
        on_finish=on_finish,
        devices=device_indices(devices),
        trust_remote_code=trust_remote_code,
        wait_seconds=wait_seconds,
    )

    if run_spec is None:
        if not profile or not recipe:
            missing = [text for text, given in (("-p PROFILE", profile), ("-r RECIPE", recipe)) if not given]
            raise UsageError(
                f"missing: {' and '.join(missing)}",
                expected="a profile and a recipe, or --run-spec FILE",
                fix="tunedeck train -p demo -r demo",
            )
        resolved = resolve(profile, recipe, sets, name=name, limits=limits)
    elif recipe:
        raise UsageError("--run-spec and -r were both given", expected="one of them", fix="leave one out")
    else:
        resolved = override(load_run_spec(run_spec), sets, profile=profile)
        changes = {"limits": limits, **({"name": _checked_name(name)} if name else {})}
        resolved = Resolved(resolved.spec.model_copy(update=changes), resolved.notices)
    check_devices(resolved.spec)
    return resolved


def _checked_name(name: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from engine.spec.base import Name

    try:
        return str(TypeAdapter(Name).validate_python(name))
    except ValidationError as error:
        raise UsageError(
            f"--name {name!r} cannot name a run",
            expected="lower-case letters, digits, '.', '_' and '-', at most 80, beginning with a letter or digit",
        ) from error


def say(notices: list[str]) -> None:
    """Notices go to stderr: standard output is for the run."""
    for notice in notices:
        sys.stderr.write(f"tunedeck: {notice}\n")


def resume(
    run: RunArgument,
    profile: Profile = None,
    sets: SetOption = None,
    from_step: FromStep = None,
    detach: Detach = False,
    json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Go on with a run that was paused, stopped or crashed, or make a finished one longer."""
    from engine.commands.follow import start_and_follow
    from engine.journal.index import note_run, resolve_run
    from engine.journal.liveness import refuse_if_claimed

    directory = resolve_run(run, runs_folder(runs))
    refuse_if_claimed(directory)
    _check_step(directory, from_step)
    say(_respecify(directory, profile, sets or [], from_step))
    warning = note_run(directory)
    say([warning] if warning else [])
    start_and_follow(directory, resume=True, from_step=from_step, detach=detach, as_json=json)


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


def _respecify(directory: RunDirectory, profile: str | None, sets: list[str], from_step: int | None) -> list[str]:
    """Write the changed spec into the run, keeping the old one. Returns what to tell the user. Raises UsageError."""
    from engine.commands.changes import aloud, changed, is_longer, refused
    from engine.journal.files import write_atomically
    from engine.journal.summary import summarise
    from engine.spec.later import refuse_unbuilt
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
    refuse_unbuilt(resolved.spec)
    longer = is_longer(changes)
    summary = summarise(directory)
    if summary.status == "done" and not longer and from_step is None:
        raise UsageError(
            f"run {directory.name} is done at step {summary.step}",
            expected="a run that is not finished, or more epochs or max_steps than it had",
            fix=f"tunedeck resume {directory.name} --set train.max_steps={max(1, summary.step) * 2}",
        )
    if changes:
        text = dump_run_spec(resolved.spec)
        write_atomically(_next_backup(directory), directory.run_toml.read_text("utf-8"))
        write_atomically(directory.run_toml, text)
    return [*resolved.notices, *aloud(changes), *_schedule_notice(resolved.spec, longer)]


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


def engine_process(
    directory: Annotated[Path, typer.Argument()],
    resume: Annotated[bool, typer.Option("--resume")] = False,
    from_step: FromStep = None,
) -> None:
    """The engine itself: started by `train` and `resume`, never by hand."""
    if not (directory / "run.toml").is_file():
        raise EnvironmentProblem(f"{directory} is no run directory", fix="use: tunedeck train")
    from engine.train.main import run

    code = run(directory.absolute(), resume=resume, from_step=from_step)
    sys.stdout.flush()
    sys.stderr.flush()
    raise typer.Exit(code)
