"""Writes a job for several machines, a Slurm batch script or a SkyPilot task, from a profile's `[nodes]`; submits
nothing.

On every machine the job starts a torchrun agent, which starts one `tunedeck train --run-spec` for each device and
restarts all of them when a rank is lost. The rendezvous is on the first machine. The job says which one that is and how
the others reach each one: torchrun would ask what the machine's own name resolves to, which is often 127.0.1.1 (torch
2.13, `_matches_machine_hostname`).
"""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from engine.config.schema.finish import PUSH, WEBHOOK
from engine.config.schema.run import RunSpec
from engine.launch.destinations import allowed
from engine.launch.environment import export_lines

SECONDS_TO_SAVE = 120
"""Between Slurm's TERM and the end of the time limit, for the step in progress and a checkpoint."""

REJOINING = """\
# A machine that is started again joins the others: with a store shared between agent and ranks, torchrun (torch 2.13)
# does not send it the address of rank 0, and all agents end after 60 s.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"""

CPUS_PER_DEVICE = 4
"""A training process and its data workers."""


@dataclass(frozen=True)
class Job:
    spec: RunSpec
    spec_file: Path
    runs: Path
    """The folder of runs, on every machine."""
    python: str
    command: str
    """The path of tunedeck.py in the installation of Tunedeck."""
    setup: str = ""
    """The user's shell commands, run first on each machine."""

    @property
    def is_cuda(self) -> bool:
        return self.spec.profile.device.kind == "cuda"


def _slurm_options(job: Job) -> str:
    devices, nodes = job.spec.profile.device.count, job.spec.profile.nodes
    options = {
        "job-name": job.spec.name,
        "nodes": nodes.count,
        "ntasks-per-node": 1,
        "cpus-per-task": CPUS_PER_DEVICE * devices,
        "mem": 0,
        "gpus-per-node": devices if job.is_cuda else None,
        "partition": nodes.partition,
        "account": nodes.account,
        "time": nodes.time_limit,
        "output": "%x-%j.log",
        "open-mode": "append",
        "requeue": True,
        "signal": f"TERM@{SECONDS_TO_SAVE}",
    }
    return "\n".join(_option(name, value) for name, value in options.items() if value is not None)


def slurm_script(job: Job) -> str:
    """The text of a batch script for `sbatch`."""
    devices, nodes = job.spec.profile.device.count, job.spec.profile.nodes
    return f"""\
#!/bin/bash
{_slurm_options(job)}
#
# {job.spec.name}: {nodes.count} machines with {devices} devices each. Submit with: sbatch FILE
# This assumes that on every machine
# - the folder of runs, the run spec and the data are on a file system that all machines mount at the same paths
#   (the folder is checked below, and again by every rank);
# - the same Python environment is at the same path ($PYTHON);
# - each can reach the first one by the name Slurm gives it, at $port and at ports that the system chooses.
# Before its time limit the job gets a signal and writes a checkpoint. If it is queued again under the same job id
# (scontrol requeue, or a preemption), it continues from there.

{_setup(job)}set -euo pipefail
PYTHON=${{TUNEDECK_PYTHON:-{shlex.quote(job.python)}}}
TUNEDECK={shlex.quote(job.command)}
SPEC={shlex.quote(str(job.spec_file))}
RUNS=${{TUNEDECK_RUNS:-{shlex.quote(str(job.runs))}}}
export TUNEDECK_JOB="slurm-${{SLURM_CLUSTER_NAME:-cluster}}-$SLURM_JOB_ID"
# How long torchrun lets the ranks save before it kills them (torch 2.13 or newer).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SECONDS_TO_SAVE - 20}
{REJOINING}
# One token cache for all machines: with one each, the data would be tokenised again on every machine but the first.
export TUNEDECK_CACHE=${{TUNEDECK_CACHE:-$RUNS/.cache}}
{export_lines(job.spec)}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${{hosts%%$'\\n'*}}
port=$((20000 + SLURM_JOB_ID % 10000))

mkdir -p "$RUNS"
mark="$RUNS/.shared-$SLURM_JOB_ID"
: > "$mark"
srun --ntasks-per-node=1 bash -c '
    for file in "$1" "$2"; do
        [ -r "$file" ] && continue
        echo "tunedeck: $(hostname) does not see $file: it must be on a file system that all machines share" >&2
        exit 6
    done' check "$mark" "$SPEC"
rm -f "$mark"

srun --ntasks-per-node=1 --cpus-per-task={CPUS_PER_DEVICE * devices} bash -c '
    [ "$SLURM_NODEID" = 0 ] && is_host=true || is_host=false
    exec "$0" -P -m torch.distributed.run --rdzv-conf="is_host=$is_host" --local-addr="$SLURMD_NODENAME" "$@"
' "$PYTHON" \\
{_agent(job, '"$head:$port"')}
"""


def skypilot_task(job: Job, gpu: str | None) -> str:
    """A task in YAML (strings as JSON, which is valid YAML) that trains the job's run with `sky jobs launch`. `gpu` is
    SkyPilot's name of it."""
    profile, nodes = job.spec.profile, job.spec.profile.nodes
    resources = {
        "cloud": nodes.cloud,
        "accelerators": f"{gpu}:{profile.device.count}" if job.is_cuda else None,
    }
    asked = "".join(f"\n  {name}: {json.dumps(value)}" for name, value in resources.items() if value)
    files = "".join(f"\n  {json.dumps(there)}: {json.dumps(here)}" for there, here in _mounts(job).items())
    script = f"""\
{_setup(job)}set -euo pipefail
PYTHON=${{TUNEDECK_PYTHON:-python3}}
TUNEDECK=$("$PYTHON" -c 'import tunedeck; print(tunedeck.__file__)')
SPEC={shlex.quote(str(job.spec_file))}
RUNS=$TUNEDECK_RUNS
export TUNEDECK_JOB="skypilot-$SKYPILOT_TASK_ID"
{REJOINING}
{export_lines(job.spec)}head=${{SKYPILOT_NODE_IPS%%$'\\n'*}}
mkdir -p "$RUNS"
# One token cache for all machines: with one each, the data would be tokenised again on every machine but the first.
export TUNEDECK_CACHE=${{TUNEDECK_CACHE:-$RUNS/.cache}}
here=$(sed -n "$((SKYPILOT_NODE_RANK + 1))p" <<< "$SKYPILOT_NODE_IPS")
[ "$SKYPILOT_NODE_RANK" = 0 ] && is_host=true || is_host=false

"$PYTHON" -P -m torch.distributed.run --rdzv-conf="is_host=$is_host" --local-addr="$here" \\
{_agent(job, '"$head:29400"')}
"""
    return f"""\
# {job.spec.name}: {nodes.count} machines with {profile.device.count} devices each. Submit with: sky jobs launch FILE
# This assumes that on every machine
# - Tunedeck is installed for python3 (--setup adds commands that see to it; $TUNEDECK_PYTHON names another one);
# - $TUNEDECK_RUNS is on a volume that all machines mount there, and that outlives them. A bucket will not do: the
#   journal is appended to, and file locks are taken. Every rank checks that it sees what rank 0 writes.
# Local files of the recipe are copied to the same paths. A task that is recovered continues from its last checkpoint.
name: {json.dumps(job.spec.name)}
num_nodes: {nodes.count}
resources:{asked or " {}"}
file_mounts:{files}
envs:
  TUNEDECK_RUNS: {json.dumps(str(job.runs))}
run: |
{_indented(script)}"""


def _agent(job: Job, endpoint: str) -> str:
    """torchrun's arguments as lines of a shell command, then the command of each rank. `endpoint` is the rendezvous
    address, HOST:PORT on the first machine."""
    nodes = job.spec.profile.nodes
    lines = [
        f"--nnodes={nodes.count}",
        f"--nproc-per-node={job.spec.profile.device.count}",
        f"--max-restarts={nodes.max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        '--rdzv-id="$TUNEDECK_JOB"',
        f'"$TUNEDECK" train --run-spec "$SPEC" --runs "$RUNS"{typed_destinations(job.spec)}',
    ]
    return " \\\n".join(f"    {line}" for line in lines)


def _option(name: str, value: object) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={value}"


def _setup(job: Job) -> str:
    return f"{job.setup}\n" if job.setup else ""


def _mounts(job: Job) -> dict[str, str]:
    """{path on the job's machines: path on this one} of the run spec and the local files that the recipe names."""
    return {path: path for path in (str(job.spec_file), *local_files(job))}


def local_files(job: Job) -> list[str]:
    """Files and folders of this machine that the recipe names."""
    recipe = job.spec.recipe
    sources = [source.path for source in (*recipe.data.sources, *recipe.data.validation)]
    wanted = [recipe.model.id, recipe.model.tokenizer, recipe.model.adapter, *sources]
    return list(dict.fromkeys(_folder_of_pattern(path) for path in wanted if path and path.startswith("/")))


def typed_destinations(spec: RunSpec) -> str:
    """What the user has allowed here is typed again there: another machine has no record of it."""
    finish = spec.recipe.finish
    given = {WEBHOOK: finish.webhook, PUSH: finish.push, "finish.push_public": "true" if finish.push_public else None}
    keys = [key for key in (WEBHOOK, PUSH) if allowed(finish, key)]
    keys += ["finish.push_public"] if PUSH in keys and finish.push_public else []
    return "".join(f" --set {shlex.quote(f'{key}={given[key]}')}" for key in keys)


def _folder_of_pattern(path: str) -> str:
    """The folder before the first wildcard of a pattern such as `data/*.jsonl`; without one, the path itself."""
    plain = itertools.takewhile(lambda part: not set(part) & set("*?["), Path(path).parts)
    return str(Path(*plain))


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" if line else "\n" for line in text.splitlines())
