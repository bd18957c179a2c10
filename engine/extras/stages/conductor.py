"""The conductor: the process of a staged run. It starts one stage's engine after another and writes the run's journal.

It holds the run's claim. If it is killed, the engine of the present stage goes on; `tunedeck resume` starts a new
conductor, which follows that engine instead of starting a second one, and copies what the journal lacks. Requests to
the run are passed on to the stage that is running.

The queue worker (`engine.launch.queue_worker`) has a simpler loop: it only waits, and keeps no journal and no claim.
"""

from __future__ import annotations

import os
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.config.load import load_run_spec
from engine.config.schema.recipe import Stage
from engine.config.schema.run import RunSpec
from engine.config.stages import enabled_stages, last_training_stage, origins, required_stages
from engine.errors import FIX, KILLED_CODE, StoppedError, TunedeckError, disk_problem
from engine.extras.stages.create_stage import create_or_update_stage, read_device_use, wait_until_released
from engine.journal.checkpoints_on_disk import remove_checkpoints
from engine.journal.control import ControlInbox, RunRequests, send_request
from engine.journal.directory import HeldRunDirectory, RunDirectory
from engine.journal.events import EventWriter, Journal, heartbeats, until_there_is_room
from engine.journal.liveness import claim, engine_process, is_alive, killed_text
from engine.journal.stages import StageJournalCopier, copied_so_far, stage_directory
from engine.journal.summary import RunSummary, SummaryReader, summarise
from engine.launch.destinations import webhook_told
from engine.launch.followers import run_on_finish
from engine.launch.process import log_tail, start_engine

POLL_SECONDS = 0.1
"""Between two looks at the running stage's journal and the requests to the run."""

T = TypeVar("T")

INTERRUPTED = ("stopped", "paused")
"""Statuses of a stage that ended at a user's request: no other stage starts after it."""


@dataclass(frozen=True)
class _Outcome:
    status: str
    exit_code: int
    reason: str = ""
    """A line that says why the stage did not end with "done"."""
    fix: str = ""


def conduct(directory: Path, *, resume: bool = False) -> int:
    """Run the stages that are not done yet, then the --on-finish command; returns the run's exit code. `resume` is
    recorded in the journal. Raises EnvironmentProblem if another process has claimed the run, SpecError for an invalid
    run.toml."""
    run = HeldRunDirectory(directory)
    spec = load_run_spec(run.run_toml, own=True)
    with claim(run), webhook_told(spec, run), EventWriter(run) as writer, heartbeats(writer):
        requests = RunRequests(ControlInbox(run), writer, spec.limits.max_hours)
        with requests.handling_signals():
            status, code = _Conductor(spec, run, writer, requests).run(resume=resume)
    run_on_finish(spec, run, status)
    return code


class _Conductor:
    def __init__(self, spec: RunSpec, run: RunDirectory, writer: EventWriter, requests: RunRequests) -> None:
        self._spec, self._run, self._writer, self._requests = spec, run, writer, requests
        self._journal = Journal(writer)
        self._outcomes: dict[str, _Outcome] = {}
        self._copied = copied_so_far(run)

    def run(self, *, resume: bool) -> tuple[str, int]:
        """(status, exit code) of the run, which are also written to its journal."""
        started = time.monotonic()
        error: str | None = None
        self._write_run_started(resume)
        try:
            self._run_stages()
            status, code, reason, error = self._overall()
            if status == "done":
                self._remove_checkpoints()
        except TunedeckError as failure:
            status, code, reason, error = "failed", failure.exit_code, "", failure.render()
        except OSError as failure:  # a full disk, or an engine that cannot be started: the journal must say so
            traceback.print_exc()
            problem = disk_problem(failure, str(self._run.path))
            status, reason = "failed", ""
            code, error = (problem.exit_code, problem.render()) if problem else (1, str(failure))
        self._journal.write(
            "run_finished",
            status=status,
            exit_code=code,
            result=self._result() if status == "done" else None,
            reason=reason,
            error=error,
            seconds=time.monotonic() - started,
        )
        return status, code

    def _write_run_started(self, resume: bool) -> None:
        self._journal.write(
            "run_started",
            run=self._run.name,
            pid=os.getpid(),
            world_size=self._spec.profile.device.count * self._spec.profile.nodes.count,
            versions=self._spec.provenance.versions,
            device=self._spec.profile.device.kind,
            simulated=self._spec.profile.device.kind == "metered",
            capacity_bytes=self._spec.profile.device.capacity_bytes,
            resumed=resume,
            seed=self._spec.recipe.train.seed,
        )

    def _run_stages(self) -> None:
        earlier = SummaryReader(self._run)
        earlier.read()
        for number, stage in enabled_stages(self._spec.recipe):
            known = earlier.state.stages.get(stage.name)
            directory = stage_directory(self._run, number, stage.name)
            if known is not None and known.status == "done" and _is_complete(directory):
                self._outcomes[stage.name] = _Outcome("done", 0)
                continue
            missing = [name for name in required_stages(stage) if self._outcomes[name].status != "done"]
            if missing:
                self._skip(number, stage, missing[0])
            else:
                self._outcomes[stage.name] = self._run_stage(number, stage)
            if self._outcomes[stage.name].status in INTERRUPTED:
                return

    def _skip(self, number: int, stage: Stage, missing: str) -> None:
        reason = f"it depends on stage {missing} ({self._outcomes[missing].status})"
        self._outcomes[stage.name] = _Outcome("skipped", 0, reason)
        self._journal.write(
            "stage_finished", name=stage.name, number=number, status="skipped", exit_code=0, reason=reason
        )

    def _run_stage(self, number: int, stage: Stage) -> _Outcome:
        """Start the stage's engine, or follow the one that already runs, until it ends. An engine that cannot be
        started is a failed outcome, not an error."""
        directory = stage_directory(self._run, number, stage.name)
        engine = engine_process(directory) if directory.exists() else None
        adopted = engine is not None and is_alive(engine)
        ended_unrecorded = not adopted and _is_complete(directory)
        process: subprocess.Popen[bytes] | None = None
        if not adopted and not ended_unrecorded:
            try:
                process = self._start(number, stage, directory)
            except TunedeckError as error:
                return self._finish(
                    number, stage, directory, _Outcome("failed", error.exit_code, error.found, error.fix)
                )
        outcome = self._follow(stage, directory, process)
        return self._finish(number, stage, directory, outcome)

    def _start(self, number: int, stage: Stage, directory: RunDirectory) -> subprocess.Popen[bytes]:
        use = wait_until_released(self._spec, self._run)
        begun = directory.exists()
        for notice in self._when_there_is_room(lambda: create_or_update_stage(self._spec, self._run, stage, directory)):
            self._warn("stage", f"{stage.name}: {notice}")
        from_start = not directory.events.exists()
        self._journal.write(
            "stage_started",
            name=stage.name,
            number=number,
            of=len(self._spec.recipe.stages),
            stage_kind=stage.kind,
            **{"from": origins(stage)},
            path=str(directory.path.relative_to(self._run.path)),
            from_start=from_start,
            device_used_bytes=use.used_bytes,
            device_processes=[{"pid": process.pid, "name": process.name, "used_bytes": process.used_bytes}
                              for process in use.processes],
        )  # fmt: skip
        if from_start:
            self._copied[stage.name] = 0
        for process in use.processes:
            held = f"{(process.used_bytes or 0) / 2**30:.1f} GiB"
            self._warn(
                "device",
                f"process {process.pid} ({process.name}) holds {held} of device memory in addition to the stage",
            )
        return self._when_there_is_room(lambda: start_engine(directory, resume=begun and not from_start))

    def _when_there_is_room(self, write: Callable[[], T]) -> T:
        return until_there_is_room(write, self._requests.poll, self._journal.warn_of_full_disk)

    def _warn(self, code: str, text: str) -> None:
        self._journal.write("warning", code=code, text=text, fix="")

    def _follow(self, stage: Stage, directory: RunDirectory, process: subprocess.Popen[bytes] | None) -> _Outcome:
        """Copy the stage's events and pass on requests until its engine has ended; `process` is None for one that an
        earlier conductor started."""
        copier = StageJournalCopier(self._writer, directory, stage.name, self._copied.get(stage.name, 0))
        asked = False
        while True:
            ended = process.poll() is not None if process is not None else not _engine_lives(directory)
            self._when_there_is_room(
                copier.copy_new
            )  # after the look at the process, so that nothing written before its end is missed
            if ended and process is not None and _engine_lives(directory):
                process = None  # an engine of an earlier conductor was still starting: it holds the claim, follow it
                continue
            if ended:
                break
            if self._requests.poll() and not asked:
                send_request(directory, self._requests.ending or "stop")
                asked = True
            if self._requests.checkpoint:
                self._requests.checkpoint = False
                send_request(directory, "checkpoint")
            time.sleep(POLL_SECONDS)
        return _outcome_of(directory, process)

    def _finish(self, number: int, stage: Stage, directory: RunDirectory, outcome: _Outcome) -> _Outcome:
        summary = summarise(directory) if directory.exists() else None
        measured = summary.measured if summary is not None else {}
        self._journal.write(
            "stage_finished",
            name=stage.name,
            number=number,
            status=outcome.status,
            exit_code=outcome.exit_code,
            steps=summary.step if summary is not None else 0,
            seconds=summary.seconds if summary is not None else None,
            peak_bytes=measured.get("peak_bytes"),
            device_used_bytes=read_device_use(self._spec).used_bytes,
            result=str(summary.result) if summary is not None and summary.result else None,
            reason=outcome.reason,
        )
        return outcome

    def _overall(self) -> tuple[str, int, str, str | None]:
        """The run's (status, exit code, reason, error): of a stage stopped or paused, else of the first that failed,
        else "done"."""
        for name, outcome in self._outcomes.items():
            if outcome.status in INTERRUPTED:
                return outcome.status, StoppedError.exit_code, f"in stage {name}", None
        failed = [(name, outcome) for name, outcome in self._outcomes.items() if outcome.status == "failed"]
        if failed:
            name, outcome = failed[0]
            reason = f"stage {name} failed: {outcome.reason}"
            fix = outcome.fix or f"see {self._run.path}/stages; then: tunedeck resume {self._run.name}"
            return "failed", outcome.exit_code or 1, reason, TunedeckError(reason, fix=fix).render()
        return "done", 0, "", None

    def _remove_checkpoints(self) -> None:
        """Those of stages that set checkpoint.keep stay, and so do the stages' results."""
        for number, stage in enabled_stages(self._spec.recipe):
            if "keep" not in stage.checkpoint:
                remove_checkpoints(stage_directory(self._run, number, stage.name).checkpoints)

    def _result(self) -> Any:
        number, stage = last_training_stage(self._spec.recipe)
        directory = stage_directory(self._run, number, stage.name)
        result = summarise(directory).result
        return str((directory.path / result).relative_to(self._run.path)) if result else None


def _is_complete(directory: RunDirectory) -> bool:
    """By the stage's own journal: the run's may mean an earlier attempt that was set aside."""
    return directory.exists() and summarise(directory).status == "done"


def _engine_lives(directory: RunDirectory) -> bool:
    engine = engine_process(directory)
    return engine is not None and is_alive(engine)


def _outcome_of(directory: RunDirectory, process: subprocess.Popen[bytes] | None) -> _Outcome:
    """By the stage's journal, else by the exit code. Without `process` (an earlier conductor's) it was then killed."""
    summary: RunSummary = summarise(directory)
    if summary.exit_code is not None:
        status = summary.status if summary.status in ("done", *INTERRUPTED) else "failed"
        reason = (summary.last_error or summary.reason or "").splitlines()
        fix = next((line.removeprefix(FIX) for line in reason[1:] if line.startswith(FIX)), "")
        return _Outcome(status, summary.exit_code, reason[0] if reason else "", fix)
    code = process.returncode if process is not None else -9
    last = log_tail(directory, lines=1)
    said = f"; its last line: {last[0]}" if last else ""
    reason_text = f"its engine {killed_text(directory) or 'ended'} without recording why{said}"
    return _Outcome("failed", KILLED_CODE if code < 0 else max(code, 1), reason_text)
