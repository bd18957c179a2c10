"""`tunedeck launch`: writes the job that trains a recipe elsewhere, on a cluster (`engine.extras.jobs.cluster_scripts`)
or in a container (`engine.extras.jobs.container_jobs`).

Try: `tunedeck launch -p my-cluster -r my-recipe --slurm`, then read the script, then `sbatch` it
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.shared import (
    ProfileOption,
    RecipeOption,
    print_line,
    print_notices,
    runs_folder,
    takes_start_options,
)
from engine.errors import EnvironmentProblem, UsageError
from engine.launch.start_options import StartOptions

if TYPE_CHECKING:
    from engine.config.schema.run import RunSpec
    from engine.extras.jobs.cluster_scripts import Job

TARGETS = ("slurm", "skypilot", "kubernetes", "jobset", "hf-jobs", "modal", "runpod", "dstack")

TargetOption = Annotated[
    str | None, typer.Option("--target", metavar="TARGET", help=f"Cluster or service: {', '.join(TARGETS)}.")
]
SlurmOption = Annotated[bool, typer.Option("--slurm", help="Same as --target slurm.")]
SkyPilotOption = Annotated[bool, typer.Option("--skypilot", help="Same as --target skypilot.")]
ImageOption = Annotated[
    str | None,
    typer.Option("--image", metavar="IMAGE", help="Container image with Tunedeck, if the target needs one."),
]
GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="Name of the GPU at the target; by default nodes.accelerators."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Output file; by default ./NAME with the target's extension."),
]
SetupOption = Annotated[
    str,
    typer.Option(
        "--setup", metavar="CMD", help="Shell command to run first on each machine, such as: module load cuda."
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Write it even if the plan says it does not fit.")]

SCRIPT_SUFFIXES = {"slurm": ".sbatch", "skypilot": ".sky.yaml"}
SUBMIT_COMMANDS = {"slurm": "sbatch", "skypilot": "sky jobs launch"}


@takes_start_options(
    "profile", "recipe", "overrides", "target", "slurm", "skypilot", "image", "gpu", "name", "out", "setup", "force",
    "runs", profile=ProfileOption, recipe=RecipeOption, force=ForceOption,
)  # fmt: skip
def launch(
    options: StartOptions,
    target: TargetOption = None,
    slurm: SlurmOption = False,
    skypilot: SkyPilotOption = False,
    image: ImageOption = None,
    gpu: GpuOption = None,
    out: OutOption = None,
    setup: SetupOption = "",
) -> None:
    """Write a job script for a cluster, or a file for a service. Nothing is submitted; the resolved run spec is written
    next to it."""
    from engine.checks.run import JOB, check_run
    from engine.extras.jobs.cluster_scripts import Job, skypilot_task, slurm_script
    from engine.extras.jobs.container_jobs import CONTAINER_TARGETS, Container
    from engine.launch.create_run import plan_checked, resolve_start
    from engine.launch.environment import refuse_stages
    from engine.launch.process import ENTRY_FILE

    resolved = resolve_start(options)
    launcher = _launcher(resolved.spec, target, slurm, skypilot)
    _refuse_what_target_ignores(launcher, image, gpu)
    gpu = gpu or resolved.spec.profile.nodes.accelerators
    _require_what_target_needs(resolved.spec, launcher, image, gpu)
    folder = runs_folder(options.runs)
    checked = check_run(resolved.spec, JOB, folder=folder)
    try:
        refuse_stages(checked.spec, launcher)
    except UsageError as error:
        checked.require(error)
    checked.require()
    spec, facts = checked.spec, checked.facts
    print_notices([*resolved.notices, *checked.notices, *checked.reported])
    print_notices(plan_checked(spec, facts, force=options.force)[1])
    container = CONTAINER_TARGETS.get(launcher)
    suffix = container.suffix if container else SCRIPT_SUFFIXES[launcher]
    script = (out or Path(spec.name + suffix)).absolute()
    job = Job(spec, script.with_suffix(".run.toml"), folder, sys.executable, str(ENTRY_FILE), setup)
    if container:
        text = container.write(Container(job, launcher, image or "", gpu))
    else:
        text = slurm_script(job) if launcher == "slurm" else skypilot_task(job, gpu)
    _write(script, text, job)
    submit = container.submit if container else SUBMIT_COMMANDS[launcher]
    print_line(f"{script}\n{job.spec_file}")
    print_line(f"check the assumptions in its first lines, then submit it: {submit} {script}")


def _launcher(spec: RunSpec, target: str | None, slurm: bool, skypilot: bool) -> str:
    """One of TARGETS, from the options, else from the profile. Raises UsageError if neither names one."""
    asked = [name for name, given in ((target, target), ("slurm", slurm), ("skypilot", skypilot)) if given]
    if len(set(asked)) > 1:
        given = " and ".join(f"--{name}" if name != target else f"--target {name}" for name in asked)
        raise UsageError(f"{given} exclude each other", expected="one of them", fix="leave one out")
    launcher = asked[0] if asked else spec.profile.nodes.launcher
    if launcher is None:
        raise UsageError(
            f"profile {spec.profile.name!r} does not set nodes.launcher",
            expected=f"--target, with one of: {', '.join(TARGETS)}",
            fix="add one of them",
        )
    if launcher not in TARGETS:
        raise UsageError(f"unknown target {launcher!r}", expected=f"one of: {', '.join(TARGETS)}")
    return launcher


def _refuse_what_target_ignores(launcher: str, image: str | None, gpu: str | None) -> None:
    from engine.extras.jobs.container_jobs import CONTAINER_TARGETS

    container = CONTAINER_TARGETS.get(launcher)
    if image is not None and container is None:
        raise UsageError(
            f"{launcher} does not use containers, so --image has no effect",
            fix="leave it out, or add --target kubernetes",
        )
    if gpu is not None and launcher != "skypilot" and not (container and container.gpu):
        raise UsageError(
            f"{launcher} only takes the number of GPUs, so --gpu has no effect",
            fix="leave it out",
        )


def _require_what_target_needs(spec: RunSpec, launcher: str, image: str | None, gpu: str | None) -> None:
    from engine.extras.jobs.container_jobs import CONTAINER_TARGETS

    is_cuda, container = spec.profile.device.kind == "cuda", CONTAINER_TARGETS.get(launcher)
    if launcher == "skypilot" and is_cuda and gpu is None:
        raise UsageError(
            f"profile {spec.profile.name!r} does not set SkyPilot's name of its GPUs",
            expected='nodes.accelerators in the profile, or --gpu, such as "H100"',
            fix="add --gpu NAME; sky show-gpus lists the names",
        )
    if container is None:
        return
    if image is None:
        raise UsageError(
            f"{launcher} runs a container, and no image is given",
            expected="--image with an image that contains Tunedeck",
            fix="build one from Tunedeck's Dockerfile (docker build -t NAME .), push it, and add --image NAME",
        )
    if container.gpu and is_cuda and gpu is None:
        raise UsageError(
            f"{launcher} needs the name of the GPU", expected="--gpu NAME", fix=f"such as --gpu '{container.gpu}'"
        )
    if spec.profile.nodes.count > 1 and not container.several:
        raise UsageError(
            f"{launcher} runs on one machine, but the profile has {spec.profile.nodes.count}",
            expected="slurm, skypilot or jobset for several machines",
            fix="add --target jobset, or --set nodes.count=1",
        )


def _write(script: Path, text: str, job: Job) -> None:
    from engine.config.load import dump_run_spec
    from engine.journal.files import write_atomically

    try:
        _refuse_to_replace(script, text)
        script.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.spec_file, dump_run_spec(job.spec))
        write_atomically(script, text)
        mode = script.stat().st_mode
        script.chmod(mode | (mode & 0o444) >> 2)  # executable by those who may read it
    except OSError as error:
        raise EnvironmentProblem(
            f"{script} cannot be written: {error.strerror or error}", fix="choose another path with --out FILE"
        ) from error


def _refuse_to_replace(script: Path, text: str) -> None:
    """Raise UsageError if the script exists with a different text: a user may have edited it."""
    if script.exists() and script.read_text("utf-8", errors="replace") != text:
        raise UsageError(
            f"{script} already exists with different content",
            fix="remove it, or choose another path with --out FILE or --name NAME",
        )
