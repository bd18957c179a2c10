"""A run whose ranks another launcher started: torchrun, `accelerate launch`, srun (`engine.launch.environment`).

Rank 0 makes the run, or finds the one that an earlier start of the job began, and broadcasts it; it writes the journal,
and its child process shows the run on its stdout. The launcher ends all ranks when one fails, and may restart them.

Try: `torchrun --nproc-per-node 2 -m tunedeck train -p demo-2 -r demo`
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config.files.text import visible
from engine.config.load import load_run_spec
from engine.config.schema.run import Limits, RunSpec
from engine.device.oom import beyond_repair
from engine.distributed.elastic import BEYOND_REPAIR_CODE, LOST_CODE, exit_without_cleanup, set_up_rank_process
from engine.distributed.ranks import Ranks
from engine.distributed.votes import LostRankError
from engine.errors import EnvironmentProblem, TunedeckError
from engine.journal.directory import HeldRunDirectory, RunDirectory
from engine.journal.events import EventTail, EventWriter, end_of_events
from engine.journal.files import read_table, write_atomically
from engine.journal.index import list_runs
from engine.journal.liveness import claim
from engine.journal.summary import summarise
from engine.launch.destinations import webhook_told
from engine.launch.environment import LauncherRank
from engine.launch.followers import run_on_finish
from engine.launch.process import ENTRY_FILE
from engine.train.run.main import EXIT_CODES, as_rank, log_to_stderr, run_other_rank, run_rank0
from engine.train.run.run_context import RunStart

SHARED_SECONDS = 30.0
"""How long other machines may take to see a new file: NFS shows a folder's old listing for up to 30 s (nfs(5))."""

SHARED_POLL_SECONDS = 0.2

LAST_WORDS_SECONDS = 20.0
"""How long rank 0 waits for the process that shows the run to print the end."""


@dataclass(frozen=True)
class Task:
    """What the ranks train: rank 0 decides it and broadcasts it."""

    path: str
    resume: bool = False
    from_step: int | None = None
    ended: int | None = None
    """Exit code of a run that has ended already; None: the ranks train."""
    token: str = ""
    """A random word in the run's `launch.json`, by which every machine checks that it sees the same folder."""


class RefusedError(TunedeckError):
    """Raised on the other ranks when rank 0 cannot start; rank 0 reports the reason."""


def train_launched(spec: RunSpec, launcher_rank: LauncherRank, settle: Callable[[], Task], *, as_json: bool) -> int:
    """Train as one rank of the run that `settle` chooses on rank 0; returns the exit code. Raises, on rank 0, the
    TunedeckError that kept the run from starting."""
    launcher_rank.export_environment()
    log_to_stderr()
    problems: list[TunedeckError] = []

    def work(ranks: Ranks) -> int:
        try:
            task = _broadcast_task(ranks, settle)
            place = HeldRunDirectory(Path(task.path))
            if task.ended is not None:
                return task.ended
            require_shared(ranks, place, task.token)
        except LostRankError:
            raise
        except TunedeckError as problem:
            problems.append(problem)
            return problem.exit_code
        if launcher_rank.is_rank0:
            return _lead(ranks, launcher_rank, place, task, as_json)
        return _follow(ranks, launcher_rank, place, task)

    code = as_rank(spec, work, lambda error: _say_loss(launcher_rank, error))
    if problems and launcher_rank.is_rank0:
        raise problems[0]
    if code in (LOST_CODE, BEYOND_REPAIR_CODE):
        # Exit codes that ask for a restart are of use only to a launcher that restarts ranks.
        exit_without_cleanup(code if launcher_rank.restarts_left else 1)
    return code


def begin_or_go_on(launcher_rank: LauncherRank, folder: Path, make: Callable[[], RunDirectory]) -> Task:
    """On rank 0: resume the run that an earlier start of this job began (exit with 0 if it is done), or `make` one."""
    place = next((place for place in list_runs(folder) if worked_on(launcher_rank, place)), None)
    if place is None:
        return take_up(launcher_rank, make(), resume=False)
    if summarise(place).status == "done":
        sys.stderr.write(f"tunedeck: the run of this job, {place.name}, is already done\n")
        return Task(str(place.path), ended=0)
    return take_up(launcher_rank, place, resume=True)


def worked_on(launcher_rank: LauncherRank, place: RunDirectory) -> bool:
    """Whether an earlier start of this launcher's job worked on the run."""
    return launcher_rank.may_resume and bool(launcher_rank.job) and _note(place).get("job") == launcher_rank.job


def take_up(launcher_rank: LauncherRank, place: RunDirectory, *, resume: bool, from_step: int | None = None) -> Task:
    """Record that this job works on the run; returns the task of all ranks. If the launcher restarted the ranks and the
    run has ended since the job's start, the task is to exit with the run's code; a job started again trains."""
    restarted = launcher_rank.restarts > 0 and worked_on(launcher_rank, place)
    offset = int(_note(place).get("from_byte", 0)) if restarted else end_of_events(place.events)
    ended = _ended(place, offset) if restarted else None
    task = Task(str(place.path), resume, from_step, ended, secrets.token_hex(8))
    note = {"launcher": launcher_rank.launcher, "job": launcher_rank.job, "token": task.token, "from_byte": offset}
    write_atomically(place.launch, json.dumps(note) + "\n")
    return task


def _note(place: RunDirectory) -> dict[str, Any]:
    try:
        return read_table(place.launch)
    except (OSError, ValueError):
        return {}


def _ended(place: RunDirectory, offset: int) -> int | None:
    """The exit code of an end recorded after byte `offset` of the events; else None."""
    ends = [event for event in EventTail(place.events, offset=offset).poll() if event["kind"] == "run_finished"]
    return int(ends[-1]["exit_code"]) if ends else None


def _broadcast_task(ranks: Ranks, settle: Callable[[], Task]) -> Task:
    """`settle`'s task on every rank. Its error is raised on rank 0, elsewhere RefusedError with its exit code."""
    mine: dict[str, Any] = {}
    problem: TunedeckError | None = None
    if ranks.is_rank0:
        try:
            mine = {"task": asdict(settle())}
        except TunedeckError as error:
            problem = error
            mine = {"code": error.exit_code}
    received = ranks.broadcast_object(mine)
    if "task" in received:
        return Task(**received["task"])
    if problem is not None:
        raise problem
    refused = RefusedError("rank 0 cannot start")
    refused.exit_code = received["code"]
    raise refused


def require_shared(ranks: Ranks, place: RunDirectory, token: str, *, patience_seconds: float = SHARED_SECONDS) -> None:
    """Raise EnvironmentProblem on every rank unless each finds `token` in the run's `launch.json` in time: all machines
    must see the same run directory. All ranks call this."""
    deadline = time.monotonic() + patience_seconds
    while not (seen := _note(place).get("token") == token) and time.monotonic() < deadline:
        time.sleep(SHARED_POLL_SECONDS)
    blind = sorted({host for host in ranks.all_gather_object("" if seen else platform.node()) if host})
    if not blind:
        return
    problem = EnvironmentProblem(
        f"{place.path} is not the same folder on all machines: {', '.join(blind)} cannot see what rank 0 wrote",
        expected="runs on a file system that every machine mounts at the same path",
        fix="choose such a folder with --runs DIR or $TUNEDECK_RUNS",
    )
    if ranks.is_rank0:
        with EventWriter(place) as writer:
            writer.write(
                "run_finished", status="failed", exit_code=problem.exit_code, result=None, error=problem.render()
            )
    raise problem


def _spec_of_rank0(place: RunDirectory, ranks: Ranks) -> RunSpec:
    """With the limits that rank 0's machine knows of: the record of what its user gave may be there alone."""
    spec = load_run_spec(place.run_toml, own=True)
    limits = Limits.model_validate(ranks.broadcast_object(spec.limits.model_dump(mode="json")))
    return spec.model_copy(update={"limits": limits})


def _lead(ranks: Ranks, launcher_rank: LauncherRank, place: RunDirectory, task: Task, as_json: bool) -> int:
    """Rank 0: hold the claim, write the journal and show the run on stdout; returns the exit code."""
    spec = _spec_of_rank0(place, ranks)
    with _shown(place, as_json), claim(place), webhook_told(spec, place):
        if task.resume and launcher_rank.may_resume:
            _write_restart(place, launcher_rank)
        try:
            status, code = run_rank0(RunStart(spec, place, ranks, task.resume, task.from_step))
        except Exception as lost:  # raised again: only what a new process can mend is told here
            if isinstance(lost, LostRankError) or beyond_repair(lost):
                traceback.print_exc()
                _write_loss(place, launcher_rank, lost)
            raise
        ranks.mark_finished()
        if status in EXIT_CODES:
            _leave_together(ranks)
    run_on_finish(spec, place, status)
    # An elastic agent takes every code but 0 for a failure, and would restart the ranks of a stopped run.
    return 0 if status in EXIT_CODES and launcher_rank.restarts_left else code


def _follow(ranks: Ranks, launcher_rank: LauncherRank, place: RunDirectory, task: Task) -> int:
    set_up_rank_process(place, ranks.rank)
    spec = _spec_of_rank0(place, ranks)
    try:
        code = run_other_rank(RunStart(spec, place, ranks, task.resume, task.from_step))
    except Exception as lost:  # raised again: only what a new process can mend is told here
        if isinstance(lost, LostRankError) or beyond_repair(lost):
            traceback.print_exc()
        raise
    if code not in EXIT_CODES.values():
        return code
    _leave_together(ranks)
    return 0 if launcher_rank.restarts_left else code


def _leave_together(ranks: Ranks) -> None:
    """Wait until all ranks are done: rank 0's process may serve the store, which the others still read."""
    with suppress(LostRankError):
        ranks.all_gather_object("over")


def _say_loss(launcher_rank: LauncherRank, error: Exception) -> None:
    sys.stderr.write(f"tunedeck: rank {launcher_rank.rank}: {visible(str(error).splitlines()[0])}\n")


def _write_restart(place: RunDirectory, launcher_rank: LauncherRank) -> None:
    left = f", {launcher_rank.restarts_left} restarts left" if launcher_rank.launcher == "torchrun" else ""
    with EventWriter(place) as writer:
        writer.write(
            "warning",
            code="restarted",
            text=f"{launcher_rank.launcher} started the ranks again{left}; the run continues from its last checkpoint",
            fix="the reason is above, or in the launcher's log",
        )


def _write_loss(place: RunDirectory, launcher_rank: LauncherRank, lost: Exception) -> None:
    """Record a lost rank: as a warning if the launcher will restart the ranks, else as the end of the run."""
    text = lost.found if isinstance(lost, LostRankError) else f"rank 0's device needs a new process: {lost}"
    with EventWriter(place) as writer:
        if launcher_rank.restarts_left > 0:
            writer.write("warning", code="rank_lost", text=text, fix="the launcher starts the ranks again")
            return
        fix = f"see the launcher's log; then start it the same way with: tunedeck resume {place.name}"
        writer.write("run_finished", status="failed", exit_code=1, result=None, error=f"{text}\nfix: {fix}")


@contextmanager
def _shown(place: RunDirectory, as_json: bool) -> Iterator[None]:
    """A child process shows the run on this process's stdout; this process's own output goes to the run's log."""
    flags = ["--from", str(end_of_events(place.events)), *(["--json"] if as_json else [])]
    # Nothing is ever written into the pipe: its end tells the child that this process is done, or dead.
    viewer = subprocess.Popen(
        [sys.executable, "-P", str(ENTRY_FILE), "_view", str(place.path), *flags], stdin=subprocess.PIPE
    )
    try:
        with _printing_to(place.log):
            yield
    finally:
        with suppress(subprocess.TimeoutExpired):
            viewer.communicate(timeout=LAST_WORDS_SECONDS)
        viewer.kill()


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    kept = [os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr)]
    with path.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    try:
        yield
    finally:
        for stream, descriptor in zip((sys.stdout, sys.stderr), kept, strict=True):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)
