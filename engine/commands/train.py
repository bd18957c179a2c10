"""`tunedeck train` and the hidden command that is the engine process itself.

Try: `tunedeck train -p demo -r demo`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.importing import importing
from engine.commands.options import JsonOption, RunsOption, SetOption, runs_folder
from engine.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory
    from engine.launch.launcher_rank import LauncherRank
    from engine.spec.load import Resolved
    from engine.spec.schema.run import RunSpec

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

def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(train)
    app.command(name="_engine", hidden=True)(engine_process)
    app.command(name="_view", hidden=True)(view_process)


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
    """Train a recipe on a hardware profile: start the engine and follow it.

    Started once for each device by torchrun, accelerate launch or srun, each process becomes a rank of one run.
    """
    from engine.commands.follow import start_and_follow
    from engine.launch.create_run import create_run, require_launcher
    from engine.launch.launcher_rank import find_launcher_rank

    resolved = resolve_arguments(
        profile, recipe, run_spec, sets or [], name,
        devices=devices, trust_remote_code=trust_remote_code, max_hours=max_hours, on_finish=on_finish,
        wait_seconds=wait,
    )  # fmt: skip
    launcher_rank = find_launcher_rank()
    if launcher_rank is not None:
        raise typer.Exit(_train_launched(resolved, launcher_rank, runs_folder(runs), force, detach, json))
    require_launcher(resolved.spec)
    print_notices([*resolved.notices, *_config_brought(resolved.spec)])
    directory, notices = create_run(resolved.spec, runs_folder(runs), force=force)
    print_notices(notices)
    start_and_follow(directory, detach=detach, as_json=json)


def _config_brought(spec: RunSpec) -> list[str]:
    """Notices about the config that the plan needs. A hub out of reach is no reason not to start: there is no plan
    then, which `create_run` says, and the engine looks for the weights itself."""
    from engine.budget.architecture.hub import bring_config
    from engine.errors import ConfigNotHereError

    try:
        return bring_config(spec)
    except ConfigNotHereError:
        return []


def _train_launched(
    resolved: Resolved, launcher_rank: LauncherRank, folder: Path, force: bool, detach: bool, as_json: bool
) -> int:
    """Be one rank of a new run, or of the one that an earlier start of the launcher's job began."""
    from engine.launch.create_run import create_run

    with importing():
        from engine.train.external_launcher import begin_or_go_on, train_launched

    def make() -> RunDirectory:
        print_notices([*resolved.notices, *_config_brought(resolved.spec)])
        directory, notices = create_run(resolved.spec, folder, force=force, launched=True)
        print_notices(notices)
        return directory

    check_launcher_rank(resolved.spec, launcher_rank, detach)
    return train_launched(
        resolved.spec, launcher_rank, lambda: begin_or_go_on(launcher_rank, folder, make), as_json=as_json
    )


def check_launcher_rank(spec: RunSpec, launcher_rank: LauncherRank, detach: bool) -> None:
    """Raise UsageError where a launcher's processes cannot be the ranks of this run."""
    from engine.launch.launcher_rank import require_rank_per_device

    require_rank_per_device(spec, launcher_rank)
    if detach:
        raise UsageError(
            f"--detach, and {launcher_rank.launcher} started this process and waits for its end",
            fix="leave --detach out, and let the launcher run in the background",
        )


def resolve_arguments(
    profile: str | None, recipe: str | None, run_spec: Path | None, sets: list[str], name: str | None, *,
    devices: str | None, trust_remote_code: bool, max_hours: float | None, on_finish: str | None,
    wait_seconds: float | None,
) -> Resolved:  # fmt: skip
    """The spec from -p and -r, or from an earlier run's file, with the limits of this start.

    Raises UsageError and what the spec raises.
    """
    from engine.spec.check.devices import parse_device_indices, require_matching_devices
    from engine.spec.load import Resolved, load_run_spec, override, resolve
    from engine.spec.schema.run import Limits

    limits = Limits(
        max_hours=max_hours,
        on_finish=on_finish,
        devices=parse_device_indices(devices),
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
    require_matching_devices(resolved.spec)
    return resolved


def _checked_name(name: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from engine.spec.schema.base import Name

    try:
        return str(TypeAdapter(Name).validate_python(name))
    except ValidationError as error:
        raise UsageError(
            f"--name {name!r} cannot name a run",
            expected="lower-case letters, digits, '.', '_' and '-', at most 80, beginning with a letter or digit",
        ) from error


def print_notices(notices: list[str]) -> None:
    """Notices go to stderr: standard output is for the run."""
    for notice in notices:
        sys.stderr.write(f"tunedeck: {notice}\n")


def engine_process(
    directory: Annotated[Path, typer.Argument()],
    resume: Annotated[bool, typer.Option("--resume")] = False,
    from_step: Annotated[int | None, typer.Option("--from", min=0)] = None,
) -> None:
    """The engine itself: started by `train` and `resume`, never by hand."""
    if not (directory / "run.toml").is_file():
        raise EnvironmentProblem(f"{directory} is no run directory", fix="use: tunedeck train")
    from engine.spec.load import load_run_spec

    profile = load_run_spec(directory / "run.toml", own=True).profile
    with importing():
        if profile.device.count * profile.nodes.count == 1 or "TUNEDECK_RANK_OF" in os.environ:
            from engine.train.main import run
        else:
            # The supervisor of several ranks trains nothing: without the models' libraries it starts in half the time.
            from engine.distributed.elastic import run_supervised as run
    code = run(directory.absolute(), resume=resume, from_step=from_step)
    sys.stdout.flush()
    sys.stderr.flush()
    raise typer.Exit(code)


def view_process(
    directory: Annotated[Path, typer.Argument()],
    offset: Annotated[int, typer.Option("--from", min=0)] = 0,
    json: JsonOption = False,
) -> None:
    """Shows a run beside a rank 0 that a launcher started; by that rank, never by hand."""
    from engine.commands.follow import view_run
    from engine.journal.directory import RunDirectory

    view_run(RunDirectory(directory), offset, as_json=json)
