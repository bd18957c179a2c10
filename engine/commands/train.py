"""`tunedeck train` and `tunedeck resume`: create or prepare a run, start its engine, and follow it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.shared import (
    START_OPTIONS,
    JsonOption,
    RunArgument,
    find_run,
    importing,
    print_notices,
    print_progress,
    runs_folder,
    takes_start_options,
)
from engine.errors import EnvironmentProblem, TunedeckError
from engine.launch.start_options import StartOptions

if TYPE_CHECKING:
    from engine.config.load import Resolved
    from engine.config.schema.run import RunSpec
    from engine.journal.directory import RunDirectory
    from engine.journal.events import EventWriter
    from engine.launch.environment import LauncherRank
    from engine.train.run.external_launcher import Task


@takes_start_options(*START_OPTIONS)
def train(options: StartOptions) -> None:
    """Train a recipe on a hardware profile, and follow the run.

    Where torchrun, accelerate launch or srun starts this command once for each device, each process becomes a rank of
    one run.
    """
    from engine.commands.follow import start_and_follow
    from engine.launch.create_run import resolve_start
    from engine.launch.environment import find_launcher_rank, require_launchable

    resolved = resolve_start(options)
    launcher_rank = find_launcher_rank()
    if launcher_rank is None and resolved.spec.recipe.sweep:
        raise typer.Exit(train_sweep(resolved, options))
    if launcher_rank is None:
        directory = _create(resolved, options)
        start_and_follow(directory, detach=options.detach, as_json=options.as_json)
        return
    require_launchable(resolved.spec, launcher_rank, detach=options.detach)
    raise typer.Exit(_train_as_rank(resolved, launcher_rank, options))


def train_sweep(resolved: Resolved, options: StartOptions) -> int:
    """Put a run for every point of a sweep into the queue and start a worker for these alone; returns the exit code of
    the first run that failed, else 0. With --detach, returns 0 without waiting for the runs."""
    from engine.commands.queue import add_sweep
    from engine.journal.queue import Queue
    from engine.launch.queue_worker import follow_queue, start_queue_worker

    names = add_sweep(resolved, options)
    folder = runs_folder(options.runs)
    pid = start_queue_worker(folder, only=names)
    held = Queue.held(folder)
    left = len(held.read().left_waiting)
    if left:
        print_progress(f"{left} more waiting in the queue; start it with: tunedeck queue start")
    if options.detach:
        return 0
    code = 0
    for text, run_code in follow_queue(held, pid, names, only=True):
        print_progress(text)
        code = code or run_code
    return code


def _create(resolved: Resolved, options: StartOptions, *, launched: bool = False) -> RunDirectory:
    """Create the run and print all notices about it; returns its directory. For `launched` see `create_run`."""
    from engine.launch.create_run import create_run

    print_notices(resolved.notices)
    folder = runs_folder(options.runs)
    directory, notices = create_run(resolved.spec, folder, force=options.force, launched=launched)
    print_notices(notices)
    return directory


def _train_as_rank(resolved: Resolved, launcher_rank: LauncherRank, options: StartOptions) -> int:
    """Train as one rank of a new run, or of the run that an earlier start of the launcher's job created; returns the
    exit code."""
    from engine.launch.environment import set_device_environment

    set_device_environment(resolved.spec)
    with importing():
        from engine.train.run.external_launcher import begin_or_go_on

    folder = runs_folder(options.runs)

    def settle() -> Task:
        return begin_or_go_on(launcher_rank, folder, lambda: _create(resolved, options, launched=True))

    return _train_launched(resolved.spec, launcher_rank, settle, as_json=options.as_json)


def _train_launched(spec: RunSpec, launcher_rank: LauncherRank, settle: Callable[[], Task], *, as_json: bool) -> int:
    """Train as one rank, and let rank 0, which alone calls `settle`, do what [finish] asks; returns the exit code."""
    from engine.train.run.external_launcher import train_launched

    led: list[Path] = []

    def settled() -> Task:
        task = settle()
        led.append(Path(task.path))
        return task

    code = train_launched(spec, launcher_rank, settled, as_json=as_json)
    for directory in led if code == 0 else ():
        finish_run(directory)
    return code


def engine_process(
    directory: Annotated[Path, typer.Argument()],
    resume: Annotated[bool, typer.Option("--resume")] = False,
    from_step: Annotated[int | None, typer.Option("--from", min=0)] = None,
) -> None:
    """Be the engine of a run: started by `train` and `resume`, never by hand."""
    if not (directory / "run.toml").is_file():
        raise EnvironmentProblem(f"{directory} is not a run directory", fix="use: tunedeck train")
    from engine.config.load import load_run_spec
    from engine.launch.environment import set_device_environment

    spec = load_run_spec(directory / "run.toml", own=True)
    profile = spec.profile
    set_device_environment(spec)
    with importing():
        if profile.device.count * profile.nodes.count == 1 or "TUNEDECK_RANK_OF" in os.environ:
            from engine.train.run.main import run
        else:
            # The supervisor of several ranks trains nothing: without the models' libraries it starts in half the time.
            from engine.distributed.elastic import run_supervised as run
    code = run(directory.absolute(), resume=resume, from_step=from_step)
    if code == 0 and "TUNEDECK_RANK_OF" not in os.environ:
        finish_run(directory.absolute())
    sys.stdout.flush()
    sys.stderr.flush()
    raise typer.Exit(code)


def finish_run(directory: Path) -> None:
    """What the recipe's [finish] asks of a run that is done. If it fails, the run stays done and its journal gets a
    warning that says how to try again."""
    from engine.config.load import load_run_spec
    from engine.config.schema.finish import PUSH
    from engine.journal.directory import RunDirectory
    from engine.journal.events import EventWriter
    from engine.journal.summary import summarise
    from engine.launch.destinations import allowed

    run = RunDirectory(directory)
    finish = load_run_spec(run.run_toml, own=True).recipe.finish
    pushes = allowed(finish, PUSH)
    if not (finish.merge or pushes) or summarise(run).status != "done":
        return
    with EventWriter(run) as writer:
        if finish.merge:
            _merge(run, writer)
        if pushes:
            _push(run, writer)


def _merge(run: RunDirectory, writer: EventWriter) -> None:
    from engine.config.load import load_run_spec
    from engine.extras.handover.merge import Bases, merge

    spec = load_run_spec(run.run_toml, own=True)
    shutil.rmtree(run.merged, ignore_errors=True)  # of an earlier, shorter training of this run
    try:
        trusted = spec.limits.trust_remote_code
        bases = Bases(four_bit=spec.recipe.model.quantize == "nf4")
        merged = merge(run.adapter, run.merged, partial(_write_phase, writer), bases=bases, trust_remote_code=trusted)
        writer.write("weights", **merged.account.event())
    except TunedeckError as error:
        writer.write("warning", code="merge", text=error.found, fix=f"tunedeck merge {run.path}")


def _push(run: RunDirectory, writer: EventWriter) -> None:
    from engine.config.load import load_run_spec
    from engine.journal.stages import result_run

    spec = load_run_spec(run.run_toml, own=True)
    finish, repo = spec.recipe.finish, spec.recipe.finish.push or ""
    options = (" --public" if finish.push_public else "") + (" --merged" if finish.merge else "")
    try:
        with importing():
            from engine.extras.handover.hub import prepare_push, send
        result = result_run(run)
        spec = load_run_spec(result.run_toml, own=True)
        writer.write("phase", name=f"sending the result to {repo}")
        asked = prepare_push(
            result, spec, repo, None, lambda text: _write_phase(writer, text),
            public=finish.push_public, merged=finish.merge, trust_remote_code=spec.limits.trust_remote_code,
            merged_folder=result.merged if result.merged.is_dir() else None, recorded=False,
        )  # fmt: skip
        url, _ = send(*asked, f"{run.name}, by tunedeck")
        writer.write("phase", name=f"uploaded the result to {url}")
    except TunedeckError as error:
        writer.write("warning", code="push", text=error.found, fix=f"tunedeck push {run.path} {repo}{options} --yes")


def _write_phase(writer: EventWriter, text: str) -> None:
    writer.write("phase", name=text)


def assembler_process(
    directory: Annotated[Path, typer.Argument()], resume: Annotated[bool, typer.Option("--resume")] = False
) -> None:
    """Be the process of a stage that assembles a mixture: started by the conductor, never by hand."""
    with importing():
        from engine.extras.stages.assembly_process import assemble_stage

    del resume  # an assembly that was interrupted is done again from its start
    raise typer.Exit(assemble_stage(directory.absolute()))


def conductor_process(
    directory: Annotated[Path, typer.Argument()], resume: Annotated[bool, typer.Option("--resume")] = False
) -> None:
    """Be the conductor of a staged run: started by `train` and `resume`, never by hand."""
    from engine.extras.stages.conductor import conduct

    code = conduct(directory.absolute(), resume=resume)
    if code == 0:
        finish_run(directory.absolute())
    raise typer.Exit(code)


def view_process(
    directory: Annotated[Path, typer.Argument()],
    offset: Annotated[int, typer.Option("--from", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show a run beside a rank 0 that a launcher started; started by that rank, never by hand."""
    from engine.commands.follow import view_run
    from engine.journal.directory import RunDirectory

    view_run(RunDirectory(directory), offset, as_json=as_json)


FromStageOption = Annotated[
    str | None,
    typer.Option("--from-stage", metavar="NAME", help="Repeat this stage and all stages that start from it."),
]
FromOption = Annotated[int | None, typer.Option("--from", metavar="STEP", min=0, help="Continue from this checkpoint.")]


@takes_start_options(
    "run", "profile", "overrides", "from_step", "from_stage", "devices", "wait", "max_hours", "on_finish",
    "trust_remote_code", "detach", "as_json", "runs",
)  # fmt: skip
def resume(
    options: StartOptions, run: RunArgument, from_step: FromOption = None, from_stage: FromStageOption = None
) -> None:
    """Continue a paused, stopped or crashed run, or make one longer.

    --max-hours, --on-finish, --devices, --wait and --trust-remote-code stay as they were; 0 or "" removes one.
    """
    from engine.checks.run import RESUME, RESUME_LAUNCHED
    from engine.commands.follow import start_and_follow
    from engine.config.load import load_run_spec, override
    from engine.launch.environment import find_launcher_rank, require_launchable
    from engine.launch.resume_run import prepare_resume, refuse_stage

    overrides, profile, limits = options.overrides or (), options.profile, options.changed_limits()
    directory = find_run(run, options.runs)
    refuse_stage(directory)

    launcher_rank = find_launcher_rank()
    command = RESUME if launcher_rank is None else RESUME_LAUNCHED

    def prepare() -> None:
        notices = prepare_resume(
            directory, overrides, limits, profile=profile, from_step=from_step, from_stage=from_stage, command=command
        )
        print_notices(notices)

    if launcher_rank is None:
        prepare()
        start_and_follow(directory, resume=True, from_step=from_step, detach=options.detach, as_json=options.as_json)
        return
    spec = override(load_run_spec(directory.run_toml), overrides, profile=profile).spec
    require_launchable(spec, launcher_rank, detach=options.detach)
    raise typer.Exit(_resume_as_rank(spec, launcher_rank, directory, prepare, from_step, options.as_json))


def _resume_as_rank(
    spec: RunSpec,
    launcher_rank: LauncherRank,
    directory: RunDirectory,
    prepare: Callable[[], None],
    from_step: int | None,
    as_json: bool,
) -> int:
    """Train as one rank of the resumed run; returns the exit code. `prepare` writes the changed spec: on rank 0 only,
    and only at the first start of the launcher's job, not when the launcher restarts the ranks."""
    from engine.launch.environment import set_device_environment

    set_device_environment(spec)
    with importing():
        from engine.train.run.external_launcher import take_up, worked_on

    def settle() -> Task:
        restarted = worked_on(launcher_rank, directory)
        if not restarted:
            prepare()
        return take_up(launcher_rank, directory, resume=True, from_step=None if restarted else from_step)

    return _train_launched(spec, launcher_rank, settle, as_json=as_json)
