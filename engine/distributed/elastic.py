"""The supervisor of a run on several devices: starts its ranks through torch's elastic agent, and restarts them from
the last checkpoint after a failure, at most `nodes.max_restarts` times.

It holds the claim on the run and trains nothing. When a rank is killed, stops answering, or reports a device beyond
repair, the agent ends all ranks. Between attempts only the supervisor writes events.

Try: `tunedeck train -p demo-2 -r demo`
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from engine.config.check.hardware_rules import require_launcher
from engine.config.load import load_run_spec
from engine.config.schema.run import RunSpec
from engine.errors import KILLED_CODE
from engine.journal import control
from engine.journal.directory import HeldRunDirectory, RunDirectory
from engine.journal.events import EventTail, EventWriter
from engine.journal.liveness import claim
from engine.launch.destinations import webhook_told
from engine.launch.followers import run_on_finish
from engine.launch.process import ENTRY_FILE

LOST_CODE = 75
"""Exit code of a rank that lost another (EX_TEMPFAIL of sysexits.h): such a rank did not cause the failure."""

BEYOND_REPAIR_CODE = 74
"""Exit code of a rank whose device or driver can only be used again by a new process (EX_IOERR)."""

SECONDS_TO_LEAVE = 30
"""Time that the remaining ranks of a failed attempt have to end before the agent kills them (torch's default)."""

RANK_OF = "TUNEDECK_RANK_OF"
"""Environment variable with the name of the run, by which a rank knows that it has a supervisor."""

PR_SET_PDEATHSIG = 1
"""prctl(2): a signal for this process when its parent ends."""


def is_rank(directory: RunDirectory) -> bool:
    """Whether this process was started as a rank of the run in `directory` by that run's supervisor."""
    return os.environ.get(RANK_OF) == directory.name


def local_rank() -> int:
    """This process's number among the ranks of its machine; 0 in a run of one process."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or 0)


def device_count(spec: RunSpec) -> int:
    return spec.profile.device.count * spec.profile.nodes.count


def own_device(spec: RunSpec, local_rank: int) -> int:
    if spec.limits.devices:
        return spec.limits.devices[local_rank]
    # With Slurm's --gpus-per-task or torchrun's --virtual-local-rank each process sees only its own GPU.
    alone = spec.profile.device.kind == "cuda" and torch.cuda.device_count() == 1
    return 0 if alone else local_rank


def spec_of_rank(spec: RunSpec, local_rank: int) -> RunSpec:
    if spec.profile.device.count == 1:
        return spec
    device = spec.profile.device.model_copy(update={"count": 1})
    return spec.model_copy(
        update={
            "profile": spec.profile.model_copy(update={"device": device}),
            "limits": spec.limits.model_copy(update={"devices": [own_device(spec, local_rank)]}),
        }
    )


def run_supervised(directory: Path, *, resume: bool = False, from_step: int | None = None) -> int:
    """Train the run on all its devices, or `resume` it from its newest checkpoint (of `from_step` or before); returns
    the exit code.

    EnvironmentProblem: another process has claimed the run. SpecError: invalid run.toml. UsageError: several machines.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    place = HeldRunDirectory(directory)
    spec = load_run_spec(place.run_toml, own=True)
    require_launcher(spec)
    with claim(place), webhook_told(spec, place):
        status, code = supervise(spec, place, resume=resume or from_step is not None, from_step=from_step)
    run_on_finish(spec, place, status)
    return code


def supervise(spec: RunSpec, directory: RunDirectory, *, resume: bool, from_step: int | None) -> tuple[str, int]:
    """Run attempts until one ends the run; returns its status and exit code. The caller holds the claim."""
    tail = EventTail(directory.events, offset=_size(directory.events))
    limit = spec.profile.nodes.max_restarts
    with _relaying_signals(directory):
        for attempt in range(limit + 1):
            reason = _attempt(spec, directory, resume, from_step if attempt == 0 else None)
            ends = [event for event in tail.poll() if event["kind"] == "run_finished"]
            if ends:
                return str(ends[-1]["status"]), int(ends[-1]["exit_code"])
            resume = True
            if attempt < limit:
                _write_restart(directory, reason, attempt + 1, limit)
    return _give_up(directory, reason, limit)


def _attempt(spec: RunSpec, directory: RunDirectory, resume: bool, from_step: int | None) -> str:
    """What went wrong, as a sentence."""
    arguments = ["_engine", str(directory.path)]
    arguments += ["--resume"] if resume else []
    arguments += ["--from", str(from_step)] if from_step is not None else []
    return start_ranks(spec, directory, arguments) or "the ranks ended without recording how the run ended"


def start_ranks(spec: RunSpec, directory: RunDirectory, arguments: list[str]) -> str:
    """Start Tunedeck once for each device, as ranks of the run, and wait; returns what went wrong, empty if nothing."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // spec.profile.device.count)))
    os.environ[RANK_OF] = directory.name
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=spec.profile.device.count,
        run_id=directory.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        signals_to_handle="SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)("-P", str(ENTRY_FILE), *arguments)
    except ChildFailedError as failed:
        return describe_failures(failed.failures, device_count(spec))
    return ""


def describe_failures(failures: dict[int, ProcessFailure], size: int) -> str:
    """Names the ranks that were killed or crashed, else those that did not answer."""
    killed_by_agent = _killed_by_agent(failures)
    causes = [
        f"rank {rank} {_manner(failure.exitcode)}"
        for rank, failure in sorted(failures.items())
        if failure.exitcode not in (0, LOST_CODE, -signal.SIGTERM) and rank not in killed_by_agent
    ]
    if causes:
        return "; ".join(causes)
    silent = [str(rank) for rank in range(size) if rank in killed_by_agent or rank not in failures]
    if not silent:
        return "the ranks lost their connection: all of them were suspended for a while, or the network was down"
    return f"rank {' or '.join(silent)} does not respond: it is suspended or stuck"


def _killed_by_agent(failures: dict[int, ProcessFailure]) -> set[int]:
    """Ranks that had not ended in time after another failed (torch 2.13 reports them, too)."""
    first = min((failure.timestamp for failure in failures.values()), default=0)
    return {
        rank
        for rank, failure in failures.items()
        if failure.exitcode == -signal.SIGKILL and failure.timestamp - first >= SECONDS_TO_LEAVE - 1
    }


def _manner(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; if this was not done by hand, the machine ran out of host memory: see dmesg)"
    if code < 0:
        return f"was terminated by signal {-code} ({signal.Signals(-code).name})"
    if code == BEYOND_REPAIR_CODE:
        return "reports a device error that requires a new process"
    return f"exited with {code}"


def _write_restart(directory: RunDirectory, reason: str, number: int, limit: int) -> None:
    with EventWriter(directory) as writer:
        writer.write(
            "warning",
            code="rank_lost",
            text=f"{reason}; restart {number} of {limit} from the last checkpoint",
            fix="the reason is in engine.log and ranks/ of the run",
        )


def _give_up(directory: RunDirectory, reason: str, limit: int) -> tuple[str, int]:
    code = KILLED_CODE if "SIGKILL" in reason else 1
    with EventWriter(directory) as writer:
        writer.write(
            "run_finished",
            status="failed",
            exit_code=code,
            result=None,
            error=f"{reason}, after {limit} restart{'s' if limit != 1 else ''}\nfix: tunedeck resume {directory.name}",
            reason=reason,
        )
    return "failed", code


class _relaying_signals:
    """While the block runs, SIGTERM and SIGINT request a stop as `tunedeck stop` does; a second one kills all ranks."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._count = 0

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def __exit__(self, *_raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            os._exit(KILLED_CODE)
        control.send_request(self._directory, "stop")


def set_up_rank_process(directory: RunDirectory, rank: int) -> None:
    """Have this process killed when the supervisor ends; on ranks but 0, redirect output to a log of their own."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if rank:
        folder = Path(directory.path) / "ranks"
        folder.mkdir(exist_ok=True)
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)


def exit_without_cleanup(code: int) -> NoReturn:
    """With another rank gone, closing gloo's connections can take half a minute."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
