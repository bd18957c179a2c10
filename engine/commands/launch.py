"""`tunedeck launch`: writes the script that trains a recipe on several machines. Nothing is submitted.

The text of the script comes from `engine.launch.cluster_scripts`.

Try: `tunedeck launch -p my-cluster -r my-recipe --slurm`, then read the script, then `sbatch` it
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.options import (
    NameOption,
    OverridesOption,
    ProfileOption,
    RecipeOption,
    RunsOption,
    runs_folder,
)
from engine.commands.output import print_line, print_notices
from engine.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from engine.launch.cluster_scripts import Job
    from engine.spec.schema.run import RunSpec

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


def launch(
    profile: ProfileOption,
    recipe: RecipeOption,
    overrides: OverridesOption = None,
    slurm: SlurmOption = False,
    skypilot: SkyPilotOption = False,
    name: NameOption = None,
    out: OutOption = None,
    setup: SetupOption = "",
    force: ForceOption = False,
    runs: RunsOption = None,
) -> None:
    """Write a script that trains on several machines. They are those of the profile's [nodes]; the resolved run spec
    is written beside it."""
    from engine.budget.advise.strategy import settle_parallel
    from engine.launch.cluster_scripts import Job, skypilot_task, slurm_script
    from engine.launch.create_run import checked_plan
    from engine.launch.process import ENTRY_FILE
    from engine.spec.load import resolve

    resolved = resolve(profile, recipe, overrides or [], name=name)
    spec, settled = settle_parallel(resolved.spec)
    launcher = _launcher(spec, slurm, skypilot)
    print_notices([*resolved.notices, *settled])
    print_notices(checked_plan(spec, runs_folder(runs), force=force)[1])
    script = (out or Path(spec.name + SCRIPT_SUFFIXES[launcher])).absolute()
    job = Job(spec, script.with_suffix(".run.toml"), runs_folder(runs), sys.executable, str(ENTRY_FILE), setup)
    _write(script, slurm_script(job) if launcher == "slurm" else skypilot_task(job), job)
    print_line(f"{script}\n{job.spec_file}")
    print_line(f"read the script's assumptions, then submit it: {SUBMIT_COMMANDS[launcher]} {script}")


def _launcher(spec: RunSpec, slurm: bool, skypilot: bool) -> str:
    """The launcher to write a script for, slurm or skypilot: from the options, else from the profile. Raises
    UsageError if neither names one."""
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
    from engine.journal.files import write_atomically
    from engine.spec.load import dump_run_spec

    try:
        _refuse_to_replace(script, text)
        script.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.spec_file, dump_run_spec(job.spec))
        write_atomically(script, text)
        os.chmod(script, 0o755)
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
