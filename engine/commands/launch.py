"""`tunedeck launch`: writes the job that trains a recipe on several machines. It submits nothing.

What the job looks like is `engine.launch.cluster_scripts`.

Try: `tunedeck launch -p my-cluster -r my-recipe --slurm`, then read the script, then `sbatch` it
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.commands.options import ProfileOption, RecipeOption, RunsOption, SetOption, runs_folder
from engine.commands.train import RunName, print_notices
from engine.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from engine.launch.cluster_scripts import Job
    from engine.spec.schema.run import RunSpec

Slurm = Annotated[bool, typer.Option("--slurm", help="A batch script for sbatch.")]
SkyPilot = Annotated[bool, typer.Option("--skypilot", help="A task for sky jobs launch.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Where to; by default NAME.sbatch or NAME.sky.yaml here.")
]
Setup = Annotated[
    str, typer.Option("--setup", metavar="CMD", help="Shell commands that come first, such as: module load cuda.")
]
Force = Annotated[bool, typer.Option("--force", help="Write it even if the plan says that it does not fit.")]

SUFFIXES = {"slurm": ".sbatch", "skypilot": ".sky.yaml"}
SUBMIT = {"slurm": "sbatch", "skypilot": "sky jobs launch"}


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(launch)


def launch(
    profile: ProfileOption,
    recipe: RecipeOption,
    sets: SetOption = None,
    slurm: Slurm = False,
    skypilot: SkyPilot = False,
    name: RunName = None,
    out: Out = None,
    setup: Setup = "",
    force: Force = False,
    runs: RunsOption = None,
) -> None:
    """Write the script that trains on the machines of a profile's [nodes], and the resolved run spec beside it."""
    from engine.launch.cluster_scripts import Job, skypilot_task, slurm_script
    from engine.launch.create_run import checked_plan
    from engine.launch.process import ENTRY_FILE
    from engine.spec.load import resolve

    resolved = resolve(profile, recipe, sets or [], name=name)
    spec = resolved.spec
    launcher = _launcher(spec, slurm, skypilot)
    print_notices(resolved.notices)
    print_notices(checked_plan(spec, runs_folder(runs), force=force)[1])
    script = (out or Path(spec.name + SUFFIXES[launcher])).absolute()
    job = Job(spec, script.with_suffix(".run.toml"), runs_folder(runs), sys.executable, str(ENTRY_FILE), setup)
    _write(script, slurm_script(job) if launcher == "slurm" else skypilot_task(job), job)
    sys.stdout.write(f"{script}\n{job.spec_file}\nread what it assumes, then: {SUBMIT[launcher]} {script}\n")


def _launcher(spec: RunSpec, slurm: bool, skypilot: bool) -> str:
    """slurm or skypilot: as asked for, else as the profile says. Raises UsageError."""
    asked = [name for name, given in (("slurm", slurm), ("skypilot", skypilot)) if given]
    if len(asked) > 1:
        raise UsageError("--slurm and --skypilot were both given", expected="one of them", fix="leave one out")
    launcher = asked[0] if asked else spec.profile.nodes.launcher
    if launcher is None:
        raise UsageError(
            f"profile {spec.profile.name!r} names no nodes.launcher",
            expected="--slurm or --skypilot",
            fix="give one of them",
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
    """Raise UsageError where a script stands that says something else: somebody may have edited it."""
    if script.exists() and script.read_text("utf-8", errors="replace") != text:
        raise UsageError(
            f"{script} is there already, and different",
            fix="remove it, or write another one with --out FILE or --name NAME",
        )
