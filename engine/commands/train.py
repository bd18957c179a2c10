"""`tunedeck train`, and two hidden commands: the engine process, and the process that shows a run beside a launcher's
rank 0.

How a run is checked and created is in `engine.launch.create_run`.

Try: `tunedeck train -p demo -r demo`
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.importing import importing
from engine.commands.options import (
    DetachOption,
    DevicesOption,
    ForceOption,
    JsonOption,
    MaxHoursOption,
    NameOption,
    OnFinishOption,
    OptionalProfile,
    OptionalRecipe,
    OverridesOption,
    RunsOption,
    RunSpecOption,
    TrustOption,
    WaitOption,
    runs_folder,
)
from engine.commands.output import print_notices, print_progress
from engine.errors import EnvironmentProblem, TunedeckError

if TYPE_CHECKING:
    from engine.journal.directory import RunDirectory
    from engine.journal.events import EventWriter
    from engine.launch.launcher_rank import LauncherRank
    from engine.spec.load import Resolved


def train(
    profile: OptionalProfile = None,
    recipe: OptionalRecipe = None,
    overrides: OverridesOption = None,
    name: NameOption = None,
    devices: DevicesOption = None,
    wait: WaitOption = None,
    detach: DetachOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    run_spec: RunSpecOption = None,
    trust_remote_code: TrustOption = False,
    max_hours: MaxHoursOption = None,
    on_finish: OnFinishOption = None,
    runs: RunsOption = None,
) -> None:
    """Train a recipe on a hardware profile, and follow the run.

    Where torchrun, accelerate launch or srun starts this command once for each device, each process becomes a rank of
    one run.
    """
    from engine.commands.follow import start_and_follow
    from engine.launch.create_run import command_line_limits, resolve_start
    from engine.launch.launcher_rank import find_launcher_rank, require_launchable
    from engine.spec.check.devices import require_launcher

    limits = command_line_limits(max_hours, wait, on_finish, devices, trust_remote_code)
    resolved = resolve_start(profile, recipe, overrides or [], run_spec=run_spec, name=name, limits=limits)
    launcher_rank = find_launcher_rank()
    if launcher_rank is None and resolved.spec.recipe.sweep:
        raise typer.Exit(train_sweep(resolved, runs_folder(runs), force=force, detach=detach, as_json=as_json))
    if launcher_rank is None:
        require_launcher(resolved.spec)
        directory = _create(resolved, runs_folder(runs), force=force)
        start_and_follow(directory, detach=detach, as_json=as_json)
        return
    require_launchable(resolved.spec, launcher_rank, detach=detach)
    raise typer.Exit(_train_as_rank(resolved, launcher_rank, runs_folder(runs), force, as_json))


def train_sweep(resolved: Resolved, folder: Path, *, force: bool, detach: bool, as_json: bool) -> int:
    """Put a run for every point of a sweep into the queue and start a worker; returns the exit code of the first run
    that failed, else 0. With `detach`, returns 0 without waiting for the runs."""
    from engine.commands.queue import add_sweep
    from engine.journal.queue import Queue
    from engine.launch.queue_worker import follow_queue, start_queue_worker

    add_sweep(resolved, folder, force=force, as_json=as_json)
    pid = start_queue_worker(folder)
    if detach:
        return 0
    code = 0
    for text, run_code in follow_queue(Queue(folder), pid):
        print_progress(text)
        code = code or run_code
    return code


def _create(resolved: Resolved, folder: Path, *, force: bool, launched: bool = False) -> RunDirectory:
    """Create the run in `folder` and print all notices about it; returns its directory. For `force` and `launched` see
    `create_run`."""
    from engine.launch.create_run import create_run

    print_notices(resolved.notices)
    directory, notices = create_run(resolved.spec, folder, force=force, launched=launched)
    print_notices(notices)
    return directory


def _train_as_rank(
    resolved: Resolved, launcher_rank: LauncherRank, folder: Path, force: bool, as_json: bool
) -> int:
    """Train as one rank of a new run, or of the run that an earlier start of the launcher's job created in `folder`;
    returns the exit code. With `force`, a run that does not fit is started as well."""
    from engine.launch.environment import set_device_environment

    set_device_environment(resolved.spec)
    with importing():
        from engine.train.external_launcher import Task, begin_or_go_on, train_launched

    def settle() -> Task:
        return begin_or_go_on(launcher_rank, folder, lambda: _create(resolved, folder, force=force, launched=True))

    return train_launched(resolved.spec, launcher_rank, settle, as_json=as_json)


def engine_process(
    directory: Annotated[Path, typer.Argument()],
    resume: Annotated[bool, typer.Option("--resume")] = False,
    from_step: Annotated[int | None, typer.Option("--from", min=0)] = None,
) -> None:
    """Be the engine of a run: started by `train` and `resume`, never by hand."""
    if not (directory / "run.toml").is_file():
        raise EnvironmentProblem(f"{directory} is not a run directory", fix="use: tunedeck train")
    from engine.launch.environment import set_device_environment
    from engine.spec.load import load_run_spec

    spec = load_run_spec(directory / "run.toml", own=True)
    profile = spec.profile
    set_device_environment(spec)
    with importing():
        if profile.device.count * profile.nodes.count == 1 or "TUNEDECK_RANK_OF" in os.environ:
            from engine.train.main import run
        else:
            # The supervisor of several ranks trains nothing: without the models' libraries it starts in half the time.
            from engine.distributed.elastic import run_supervised as run
    code = run(directory.absolute(), resume=resume, from_step=from_step)
    if code == 0 and "TUNEDECK_RANK_OF" not in os.environ:
        _merge_if_asked(directory.absolute())
    sys.stdout.flush()
    sys.stderr.flush()
    raise typer.Exit(code)


def _merge_if_asked(directory: Path) -> None:
    """Merge the adapter of the run in `directory` if the recipe has finish.merge and the run is done. If merging fails,
    the run stays done and its journal gets a warning that says how to try again."""
    from engine.journal.directory import RunDirectory
    from engine.journal.events import EventWriter
    from engine.spec.load import load_run_spec

    run = RunDirectory(directory)
    spec = load_run_spec(run.run_toml, own=True)
    if not spec.recipe.finish.merge:
        return
    shutil.rmtree(run.merged, ignore_errors=True)  # of an earlier, shorter training of this run
    from engine.export.merge import merge

    with EventWriter(run) as writer:
        try:
            trusted = spec.limits.trust_remote_code
            merge(run.adapter, run.merged, lambda text: _write_phase(writer, text), trust_remote_code=trusted)
        except TunedeckError as error:
            writer.write("warning", code="merge", text=error.found, fix=f"tunedeck merge {run.path}")


def _write_phase(writer: EventWriter, text: str) -> None:
    writer.write("phase", name=text)


def assembler_process(
    directory: Annotated[Path, typer.Argument()], resume: Annotated[bool, typer.Option("--resume")] = False
) -> None:
    """Be the process of a stage that assembles a mixture: started by the conductor, never by hand."""
    with importing():
        from engine.export.assembly_process import assemble_stage

    del resume  # an assembly that was interrupted is done again from its start
    raise typer.Exit(assemble_stage(directory.absolute()))


def conductor_process(
    directory: Annotated[Path, typer.Argument()], resume: Annotated[bool, typer.Option("--resume")] = False
) -> None:
    """Be the conductor of a staged run: started by `train` and `resume`, never by hand."""
    from engine.stages.conductor import conduct

    raise typer.Exit(conduct(directory.absolute(), resume=resume))


def view_process(
    directory: Annotated[Path, typer.Argument()],
    offset: Annotated[int, typer.Option("--from", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show a run beside a rank 0 that a launcher started; started by that rank, never by hand."""
    from engine.commands.follow import view_run
    from engine.journal.directory import RunDirectory

    view_run(RunDirectory(directory), offset, as_json=as_json)
