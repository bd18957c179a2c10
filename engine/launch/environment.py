"""Environment variables: those that CUDA, cuBLAS and torch's allocator read once in an engine, and those by which a
launcher (torchrun, accelerate launch, srun) tells a process its rank."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from engine.config.schema.run import RunSpec
from engine.errors import UsageError
from engine.journal.liveness import identify

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Both names of torch's allocator settings. torch 2.11 to 2.13 read either one; if both are set, the first."""

DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""A cuBLAS workspace of fixed size (cuBLAS documentation, "Results reproducibility"); see
`engine.device.determinism`."""


def device_environment(spec: RunSpec, present: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process of this run needs, without those in `present`: values that the user set are kept.
    Empty for runs in host memory. `CUDA_DEVICE_ORDER` makes CUDA number the GPUs as nvidia-smi and `--devices` do; by
    default it puts the fastest first."""
    device = spec.profile.device
    if device.kind != "cuda":
        return {}
    wanted = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if device.allocator and not any(present.get(name) for name in ALLOCATOR_VARIABLES):
        wanted[ALLOCATOR_VARIABLES[0]] = device.allocator
    if spec.recipe.train.deterministic:
        wanted |= DETERMINISM
    return {name: value for name, value in wanted.items() if not present.get(name)}


def set_device_environment(spec: RunSpec, environment: MutableMapping[str, str] = os.environ) -> None:
    """Call it before torch and peft are imported: peft imports bitsandbytes where that is installed, which asks every
    GPU for its compute capability and so starts CUDA and torch's allocator."""
    environment.update(device_environment(spec, environment))


def export_lines(spec: RunSpec) -> str:
    """As lines of a shell script, each of which leaves a variable unchanged that is already set on the machine."""
    lines = ""
    for name, value in device_environment(spec, {}).items():
        names = ALLOCATOR_VARIABLES if name in ALLOCATOR_VARIABLES else (name,)
        set_already = "".join(f"${{{each}:-}}" for each in names)
        lines += f'[ -n "{set_already}" ] || export {name}={shlex.quote(value)}\n'
    return lines


JOB_VARIABLE = "TUNEDECK_JOB"
"""Set by scripts of `tunedeck launch`: starts with the same value continue the same run."""

FIRST_PORT, PORTS = 20_000, 10_000
"""For the rendezvous of a Slurm step: above the registered services, below Linux's ephemeral ports."""


@dataclass(frozen=True)
class LauncherRank:
    """This process's rank in a launcher's job, how to reach rank 0, and whether the job can continue or restart."""

    launcher: str
    """One of "torchrun", "srun", or "environment" for any launcher that sets RANK and WORLD_SIZE."""
    rank: int
    size: int
    local_rank: int
    master_address: str
    master_port: int
    job: str = ""
    """The same at every start of one job; empty where each start is a job of its own."""
    may_resume: bool = False
    """Whether an earlier start of the job may have left a run to continue."""
    restarts: int = 0
    """How often this launcher has restarted all ranks; a job that was queued again has a new launcher."""
    restarts_left: int = 0

    @property
    def is_rank0(self) -> bool:
        """Rank 0 creates the run and writes its journal."""
        return self.rank == 0

    def export_environment(self) -> None:
        """Set what torch.distributed reads: rank, world size and master address."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK=str(self.local_rank),
            MASTER_ADDR=self.master_address,
            MASTER_PORT=str(self.master_port),
        )


def find_launcher_rank(environment: Mapping[str, str] = os.environ) -> LauncherRank | None:
    """None if the process was started alone. Raises UsageError if some of the launcher's variables are missing."""
    # A job of one process counts, too: queued again, it continues its run.
    least = 1 if environment.get(JOB_VARIABLE) else 2
    if _number(environment, "WORLD_SIZE", 0) >= least and "RANK" in environment:
        return _torchrun(environment) if "TORCHELASTIC_RUN_ID" in environment else _plain(environment)
    if _number(environment, "SLURM_STEP_NUM_TASKS", 0) >= least and "SLURM_PROCID" in environment:
        return _slurm(environment)
    return None


def require_launchable(spec: RunSpec, launcher_rank: LauncherRank, *, detach: bool) -> None:
    """Raise UsageError unless the processes can be the ranks: no stages, one process for each device, no --detach."""
    refuse_stages(spec, launcher_rank.launcher)
    require_rank_per_device(spec, launcher_rank)
    if detach:
        raise UsageError(
            f"--detach cannot be used: {launcher_rank.launcher} started this process and waits for it to end",
            fix="leave out --detach, and run the launcher in the background",
        )


def refuse_stages(spec: RunSpec, launcher: str) -> None:
    """Raise UsageError for a recipe with stages, whose ranks `launcher` (srun, torchrun, ...) would start."""
    if spec.recipe.stages:
        raise UsageError(
            f"recipe {spec.recipe.name!r} has stages, but {launcher} starts the ranks of a single stage",
            fix=f"start it without {launcher}: tunedeck train starts the ranks of each stage",
        )


def require_rank_per_device(spec: RunSpec, launcher_rank: LauncherRank) -> None:
    profile = spec.profile
    devices = profile.device.count * profile.nodes.count
    if launcher_rank.size == devices:
        return
    each = f"{profile.device.count} on each of {profile.nodes.count} machines"
    raise UsageError(
        f"{launcher_rank.launcher} started {launcher_rank.size} processes, but profile {profile.name!r} has "
        f"{devices} {'devices' if devices != 1 else 'device'}",
        expected=each if profile.nodes.count > 1 else f"{devices}, one for each device",
        fix=f"start {devices}, or choose a profile whose device.count × nodes.count is {launcher_rank.size}",
    )


def _torchrun(environment: Mapping[str, str]) -> LauncherRank:
    restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT", 0)
    return _plain(
        environment,
        launcher="torchrun",
        job=environment.get(JOB_VARIABLE) or _elastic_job(environment["TORCHELASTIC_RUN_ID"]),
        may_resume=bool(environment.get(JOB_VARIABLE)) or restarts > 0,
        restarts=restarts,
        restarts_left=_number(environment, "TORCHELASTIC_MAX_RESTARTS", 0) - restarts,
    )


def _elastic_job(run_id: str) -> str:
    """torchrun's run id; for the default, which all jobs share, host, start time and pid of the agent process."""
    if run_id not in ("", "none"):
        return f"torchrun {run_id}"
    agent = identify(os.getppid())
    return f"torchrun {agent.host} {agent.started} {agent.pid}" if agent is not None else ""


def _plain(
    environment: Mapping[str, str],
    *,
    launcher: str = "environment",
    job: str = "",
    may_resume: bool = False,
    restarts: int = 0,
    restarts_left: int = 0,
) -> LauncherRank:
    rank = _number(environment, "RANK", 0)
    if not environment.get("MASTER_ADDR"):
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={environment['WORLD_SIZE']} are set, but MASTER_ADDR is not",
            expected="the address of rank 0's machine in MASTER_ADDR, and a free port there in MASTER_PORT",
            fix="set them, or start with torchrun; to start all ranks of one machine, unset RANK and WORLD_SIZE",
        )
    return LauncherRank(
        launcher,
        rank,
        _number(environment, "WORLD_SIZE", 1),
        _number(environment, "LOCAL_RANK", rank),
        environment["MASTER_ADDR"],
        _number(environment, "MASTER_PORT", 29_500),
        job,
        may_resume,
        restarts,
        restarts_left,
    )


def _slurm(environment: Mapping[str, str]) -> LauncherRank:
    """From srun's variables ("OUTPUT ENVIRONMENT VARIABLES" in srun(1)). A requeued job keeps its id."""
    job, step = _number(environment, "SLURM_JOB_ID", 0), _number(environment, "SLURM_STEP_ID", 0)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    if not address:
        raise UsageError(
            "srun started this process, but SLURM_STEP_NODELIST, the list of machines, is not set",
            fix="set MASTER_ADDR to the address of the first machine",
        )
    return LauncherRank(
        "srun",
        _number(environment, "SLURM_PROCID", 0),
        _number(environment, "SLURM_STEP_NUM_TASKS", 1),
        _number(environment, "SLURM_LOCALID", 0),
        address,
        _number(environment, "MASTER_PORT", FIRST_PORT + (16 * job + step) % PORTS),
        environment.get(JOB_VARIABLE) or f"slurm {environment.get('SLURM_CLUSTER_NAME', '')} {job}.{step}",
        bool(environment.get(JOB_VARIABLE)) or _number(environment, "SLURM_RESTART_COUNT", 0) > 0,
    )


def first_host(node_list: str) -> str:
    """Such as gpu03 for `gpu[03-06,9],big1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name}={text!r} is set in the environment", expected="a number", fix=f"unset {name}")
    return int(text)
