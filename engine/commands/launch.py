"""`tunedeck launch`: writes the script that trains a recipe on several machines (`engine.launch.cluster_scripts`).

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
    from engine.launch.cluster_scripts import Job

SlurmOption = Annotated[bool, typer.Option("--slurm", help="A batch script for sbatch.")]
SkyPilotOption = Annotated[bool, typer.Option("--skypilot", help="A task for sky jobs launch.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Where to; by default ./NAME.sbatch or ./NAME.sky.yaml.")
]
SetupOption = Annotated[
    str,
    typer.Option("--setup", metavar="CMD", help="Shell commands to run first on each machine: module load cuda."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Write it even if the plan says that it does not fit.")]

SCRIPT_SUFFIXES = {"slurm": ".sbatch", "skypilot": ".sky.yaml"}
SUBMIT_COMMANDS = {"slurm": "sbatch", "skypilot": "sky jobs launch"}


@takes_start_options(
    "profile", "recipe", "overrides", "slurm", "skypilot", "name", "out", "setup", "force", "runs",
    profile=ProfileOption, recipe=RecipeOption, force=ForceOption,
)  # fmt: skip
def launch(
    options: StartOptions,
    slurm: SlurmOption = False,
    skypilot: SkyPilotOption = False,
    out: OutOption = None,
    setup: SetupOption = "",
) -> None:
    """Write a script that trains on several machines. They are those of the profile's [nodes]; the resolved run spec
    is written beside it."""
    from engine.budget.advise.gate import admit
    from engine.launch.cluster_scripts import Job, skypilot_task, slurm_script
    from engine.launch.create_run import plan_admitted, resolve_start
    from engine.launch.environment import refuse_stages
    from engine.launch.process import ENTRY_FILE

    resolved = resolve_start(options)
    launcher = _launcher(resolved.spec, slurm, skypilot)
    refuse_stages(resolved.spec, launcher)
    spec, facts, settled = admit(resolved.spec)
    print_notices([*resolved.notices, *settled])
    folder = runs_folder(options.runs)
    print_notices(plan_admitted(spec, facts, folder, force=options.force)[1])
    script = (out or Path(spec.name + SCRIPT_SUFFIXES[launcher])).absolute()
    job = Job(spec, script.with_suffix(".run.toml"), folder, sys.executable, str(ENTRY_FILE), setup)
    _write(script, slurm_script(job) if launcher == "slurm" else skypilot_task(job), job)
    print_line(f"{script}\n{job.spec_file}")
    print_line(f"read the script's assumptions, then submit it: {SUBMIT_COMMANDS[launcher]} {script}")


def _launcher(spec: RunSpec, slurm: bool, skypilot: bool) -> str:
    """slurm or skypilot, from the options, else from the profile. Raises UsageError if neither names one."""
    asked = [name for name, given in (("slurm", slurm), ("skypilot", skypilot)) if given]
    if len(asked) > 1:
        raise UsageError("--slurm and --skypilot were both given", expected="one of them", fix="leave one out")
    launcher = asked[0] if asked else spec.profile.nodes.launcher
    if launcher is None:
        raise UsageError(
            f"profile {spec.profile.name!r} names no nodes.launcher",
            expected="--slurm or --skypilot",
            fix="add one of them",
        )
    if launcher == "skypilot" and spec.profile.device.kind == "cuda" and spec.profile.nodes.accelerators is None:
        raise UsageError(
            f"profile {spec.profile.name!r} does not say what SkyPilot calls its GPUs",
            expected='nodes.accelerators, such as "H100"',
            fix="set it in the profile; sky show-gpus lists the names",
        )
    return launcher


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
            f"{script} cannot be written: {error.strerror or error}", fix="choose another place with --out FILE"
        ) from error


def _refuse_to_replace(script: Path, text: str) -> None:
    """Raise UsageError if the script exists with a different text: a user may have edited it."""
    if script.exists() and script.read_text("utf-8", errors="replace") != text:
        raise UsageError(
            f"{script} exists already, and its text is different",
            fix="remove it, or write another one with --out FILE or --name NAME",
        )
