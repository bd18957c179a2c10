"""The engine process: from a run directory to an exit code. All its output goes into the journal and its log.

Try: `tunedeck train -p demo -r demo --detach`, then `tunedeck log last`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.config.files.cgroups import host_memory_bytes, oom_kills
from engine.config.load import load_run_spec
from engine.config.schema.run import RunSpec
from engine.data.report import WARNING, DataReport, drop_lines
from engine.device.base import Device
from engine.device.cuda import allocator_settings
from engine.device.determinism import deterministic_kernels
from engine.device.oom import beyond_repair, classify, frozen_gc, is_lost
from engine.device.open import open_device
from engine.distributed.elastic import (
    BEYOND_REPAIR_CODE,
    LOST_CODE,
    exit_without_cleanup,
    is_rank,
    local_rank,
    own_device,
    set_up_rank_process,
    spec_of_rank,
)
from engine.distributed.ranks import SINGLE_PROCESS, Ranks, process_group
from engine.distributed.votes import LostRankError
from engine.distributed.warm_up import warm_up
from engine.errors import (
    DeviceBusyError,
    DivergedError,
    EnvironmentProblem,
    MemoryExhaustedError,
    TunedeckError,
    disk_problem,
)
from engine.journal.control import ControlInbox, RunRequests
from engine.journal.directory import HeldRunDirectory, RunDirectory
from engine.journal.events import EventWriter, Journal, heartbeats, until_there_is_room
from engine.journal.liveness import Attempt, claim, forget_attempt, killed_attempt, note_attempt
from engine.launch.destinations import webhook_told
from engine.launch.followers import run_on_finish, trackers_following
from engine.model.config import disable_progress_bars
from engine.train.run.checkpoints import EmergencyHostMemory
from engine.train.run.loop import Ending, Training
from engine.train.run.measured import calibrate
from engine.train.run.oom_report import OomReports, oom_reporter
from engine.train.run.preferences import learn_preferences
from engine.train.run.run_context import RunContext, RunStart, Watchdog
from engine.train.run.run_state import with_layers_of_checkpoint
from engine.train.run.setup import set_up
from engine.train.step.ladder import effective_spec
from engine.verify.among_ranks import refuse_shared_cards
from engine.verify.verify import prove

PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets")
WAIT_POLL_SECONDS = 5.0
EXIT_CODES = {"done": 0, "stopped": 130, "paused": 130}

log = logging.getLogger("tunedeck")


def run(directory: Path, *, resume: bool = False, from_step: int | None = None) -> int:
    """Train the run, or `resume` it from its newest checkpoint (of `from_step` or before); returns the exit code.

    EnvironmentProblem: another process has claimed the run. SpecError: its run.toml is invalid.
    """
    log_to_stderr()
    place = HeldRunDirectory(directory)
    spec = load_run_spec(place.run_toml, own=True)
    resume = resume or from_step is not None
    if is_rank(place):
        return _run_rank(spec, place, resume, from_step)
    with claim(place), webhook_told(spec, place):
        status, code = run_rank0(RunStart(spec, place, SINGLE_PROCESS, resume, from_step))
    run_on_finish(spec, place, status)
    return code


def _run_rank(spec: RunSpec, place: RunDirectory, resume: bool, from_step: int | None) -> int:
    """The exit code for the supervisor: 0, or one that asks for a new attempt. The run's own is in the journal."""

    def work(ranks: Ranks) -> int:
        start = RunStart(spec, place, ranks, resume, from_step)
        if ranks.is_rank0:
            run_rank0(start)
            ranks.mark_finished()
        else:
            run_other_rank(start)
        return 0

    set_up_rank_process(place, int(os.environ["RANK"]))
    code = as_rank(spec, work)
    return exit_without_cleanup(code) if code else code


def as_rank(
    spec: RunSpec, work: Callable[[Ranks], int], report: Callable[[Exception], None] = traceback.print_exception
) -> int:
    """Join the other ranks and do `work`; returns its exit code.

    If another rank is lost, or this device needs a new process, `report` gets the error and the code is LOST_CODE or
    BEYOND_REPAIR_CODE; the process must then end through `exit_without_cleanup`.
    """
    device = spec.profile.device.kind
    try:
        with process_group(spec.profile.parallel.timeout_seconds, device, own_device(spec, local_rank())) as ranks:
            return work(ranks)
    except LostRankError as error:
        report(error)
        return LOST_CODE
    except Exception as error:  # raised again, unless a new process can mend it
        if not beyond_repair(error):
            raise
        report(error)
        return BEYOND_REPAIR_CODE


def run_rank0(start: RunStart) -> tuple[str, int]:
    """Train as the only process or rank 0, which writes events; returns (status, exit code)."""
    with EventWriter(start.directory) as writer, heartbeats(writer):
        requests = RunRequests(ControlInbox(start.directory), writer, start.spec.limits.max_hours)
        journal = Journal(writer)
        tracked = trackers_following(start.spec, start.directory, writer.last_seq, journal.warn)
        with tracked, requests.handling_signals():
            return _train_and_record(start, journal, requests)


def run_other_rank(start: RunStart) -> int:
    """Train; returns the exit code. An error that ends this rank is left in the ranks' store for rank 0 to record."""
    requests = RunRequests(None, None, None)
    try:
        with requests.handling_signals():
            ending, _ = _train(start, Journal(None), requests)
            return EXIT_CODES[ending.status]
    except LostRankError:
        raise
    except Exception as failure:  # (the process boundary: a defect ends the run with a record of it)
        if beyond_repair(failure):
            raise
        traceback.print_exc()
        status, code, error = _describe(failure, start.directory)
        start.ranks.note_error({"status": status, "exit_code": code, "error": error})
        return code


def _train_and_record(start: RunStart, journal: Journal, requests: RunRequests) -> tuple[str, int]:
    """Train, and write `run_finished` however it ends; returns (status, exit code). Of a lost rank nothing is recorded
    and LostRankError raised, unless it noted the error that ended it."""
    ending = Ending("failed", "")
    error: str | None = None
    facts: dict[str, Any] = {}
    try:
        ending, facts = _train(start, journal, requests)
        status, code = ending.status, EXIT_CODES[ending.status]
    except LostRankError:
        noted = start.ranks.noted_error()
        if noted is None:
            raise
        traceback.print_exc()
        status, code, error = noted["status"], noted["exit_code"], f"rank {noted['rank']}: {noted['error']}"
    except Exception as failure:  # of any kind: the journal must say how the run ended
        if start.ranks.size > 1 and beyond_repair(failure):
            raise
        traceback.print_exc()
        status, code, error = _describe(failure, start.directory)
    _forget_attempt(start.directory)
    journal.write(
        "run_finished",
        status=status,
        exit_code=code,
        result=ending.result,
        error=error,
        reason=ending.reason,
        **facts,
    )
    return status, code


def _forget_attempt(place: RunDirectory) -> None:
    try:
        forget_attempt(place)
    except OSError as error:  # a note that stays counts only after another kill; the journal must say how the run ended
        log.warning("the note of this attempt cannot be removed: %s", error)


def _describe(failure: Exception, place: RunDirectory) -> tuple[str, int, str]:
    """(status, exit code, error message) of a run that `failure` ended; an unexpected one's message names the log."""
    if isinstance(failure, TunedeckError):
        status = "oom" if isinstance(failure, MemoryExhaustedError) else "failed"
        return status, failure.exit_code, failure.render()
    if (problem := disk_problem(failure, str(place.path))) is not None:
        problem.fix += f"; then continue from the last checkpoint: tunedeck resume {place.name}"
        return "failed", problem.exit_code, problem.render()
    if is_lost(failure):
        lost = EnvironmentProblem(
            f"the device failed: {str(failure).partition(chr(10))[0]}",
            fix=f"see nvidia-smi, and dmesg for Xid; to continue: tunedeck resume {place.name}",
        )
        return "failed", lost.exit_code, lost.render()
    found = classify(failure)
    status, code = ("oom", MemoryExhaustedError.exit_code) if found else ("failed", 1)
    error = TunedeckError(
        f"{'' if found else 'unexpected '}{type(failure).__name__}: {failure}",
        fix=f"the traceback is in the run's log: tunedeck log {place.name}",
    )
    return status, code, error.render()


def _train(start: RunStart, journal: Journal, requests: RunRequests) -> tuple[Ending, dict[str, Any]]:
    """How the run ended, and the measured fields of `run_finished`."""
    spec, place, ranks = start.spec, start.directory, start.ranks
    killed = _note_attempt(start, journal, requests)
    device = _open(spec_of_rank(spec, ranks.local_rank), journal, requests, ranks)
    _write_run_started(start, journal, device)
    with device.activate(), deterministic_kernels(spec.recipe.train.deterministic, device.kind):
        emergency_memory = EmergencyHostMemory()
        reports = OomReports(place, device, lambda: spec)
        report = oom_reporter(journal, device, reports if ranks.is_rank0 else None)
        if ranks.size > 1 and device.kind == "cuda":
            journal.phase("connecting the GPUs")
            refuse_shared_cards(device, ranks)
            warm_up(device, ranks.patience_seconds)
        journal.write_notices(device.fit_capacity())
        to_train = within_container(spec, device)
        if start.resume:
            to_train = with_layers_of_checkpoint(to_train, place.checkpoints, start.from_step, ranks)
        setup = set_up(to_train, device, journal, report, ranks)
        prove(setup, journal)
        learn_preferences(setup, place, journal)
        reports.spec = lambda: effective_spec(setup.spec, setup.context)
        reports.row_targets = setup.context.bounds.targets
        watchdog = Watchdog(journal, spec.profile.parallel.timeout_seconds)
        training = Training(setup, RunContext(place, journal, requests, watchdog), emergency_memory)
        _write_stage_started(training, journal)
        if not start.resume:
            _tell_data(setup.prepared.report, journal)
        if start.resume:
            training.resume(start.from_step)
        if killed is not None:
            training.start_smaller(killed)
        if ranks.is_rank0:
            attempt = Attempt(oom_kills(), setup.context.budget.budget_bytes)
            until_there_is_room(lambda: note_attempt(place, attempt), requests.poll, journal.warn_of_full_disk)
        with frozen_gc(), watchdog.watching(), _checkpoint_on_failure(training, ranks):
            ending = training.run()
        if ranks.is_rank0:
            calibrate(device, ranks.size, training.probe_memory, journal)
            training.pace.keep(journal)
        return ending, {"measured": training.measured(), "samples_lost": training.samples_lost}


def _note_attempt(start: RunStart, journal: Journal, requests: RunRequests) -> Attempt | None:
    """Note for the next attempt that this one begins; returns the last one, on all ranks, if the kernel killed it for
    host memory. Raises MemoryExhaustedError for the second in a row that did not come to train."""
    killed = killed_attempt(start.directory) if start.ranks.is_rank0 else None
    told = start.ranks.broadcast_object(asdict(killed) if killed is not None else None)
    killed = Attempt(**told) if told is not None else None
    count = killed.killed_before + 1 if killed is not None and killed.budget_bytes is None else 0
    if count > 1:
        raise MemoryExhaustedError(
            f"the kernel killed the engine {count} times before training started: host memory ran out",
            expected=f"a model that fits in {host_memory_bytes() / 2**30:.3g} GiB with its optimizer state and "
            "the libraries",
            fix="raise the memory limit of this container or job, or train a smaller model",
        )
    if killed is not None:
        journal.warn("host_memory", "the kernel killed the last engine of this run because host memory ran out")
    if start.ranks.is_rank0:
        attempt = Attempt(oom_kills(), None, count)
        until_there_is_room(lambda: note_attempt(start.directory, attempt), requests.poll, journal.warn_of_full_disk)
    return killed


def within_container(spec: RunSpec, device: Device) -> RunSpec:
    """`spec` with the capacity that a container leaves to a CPU device, so that the plan is made for it."""
    table = spec.profile.device
    if device.kind != "cpu" or device.capacity_bytes >= table.capacity_bytes:
        return spec
    table = table.model_copy(update={"memory_gib": device.capacity_bytes / 2**30 + table.reserve_gib})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"device": table})})


def _open(spec: RunSpec, journal: Journal, requests: RunRequests, ranks: Ranks) -> Device:
    """With `--wait`, try until the device is free on every rank, the time is up, or a stop is requested."""
    deadline = time.monotonic() + (spec.limits.wait_seconds or 0.0)
    device: Device | None = None
    while True:
        busy: DeviceBusyError | None = None
        try:
            device = device or open_device(spec)
        except DeviceBusyError as error:
            busy = error
        seconds_left = deadline - time.monotonic()
        waits_for, over = all_gather_busy(ranks, busy, seconds_left <= 0 or requests.poll())
        if device is not None and not waits_for:
            return device
        if over:
            raise busy or DeviceBusyError(
                waits_for, fix="end the processes that hold it, or wait longer with --wait SECONDS"
            )
        journal.phase("waiting for the device", waits_for)
        time.sleep(max(0.0, min(WAIT_POLL_SECONDS, seconds_left)))


def all_gather_busy(ranks: Ranks, busy: DeviceBusyError | None, over: bool) -> tuple[str, bool]:
    """Over all ranks: (which devices are busy, in words, empty if none; rank 0's `over`: it has waited long enough)."""
    gathered = ranks.all_gather_object([busy.found if busy else "", over])
    words = [f"rank {rank}: {found}" if ranks.size > 1 else found for rank, (found, _) in enumerate(gathered) if found]
    return "; ".join(words), gathered[0][1]


@contextmanager
def _checkpoint_on_failure(training: Training, ranks: Ranks) -> Iterator[None]:
    """If the block runs out of memory or diverges, save a checkpoint of the last finished step."""
    try:
        yield
    except (MemoryExhaustedError, DivergedError):
        # Where weights are spread over ranks all of them raise the same error, and saving takes all of them.
        saves = ranks.is_rank0 or training.context.strategy.all_ranks_save
        if saves and training.state.step and training.sound:
            training.checkpoints.save("before giving up")
        raise


def _write_run_started(start: RunStart, journal: Journal, device: Device) -> None:
    journal.write(
        "run_started",
        run=start.directory.name,
        pid=os.getpid(),
        world_size=start.ranks.size,
        versions={package: version(package) for package in PACKAGES},
        device=device.kind,
        device_name=device.name,
        simulated=device.simulated,
        capacity_bytes=device.capacity_bytes,
        allocator=allocator_settings() if device.kind == "cuda" else None,
        resumed=start.resume,
        seed=start.spec.recipe.train.seed,
    )
    journal.write_notices(device.notices)


def _write_stage_started(training: Training, journal: Journal) -> None:
    setup = training.setup
    data, validation = setup.prepared.train, setup.prepared.validation
    journal.write(
        "stage_started",
        max_steps=setup.total_steps,
        batch_size=setup.spec.recipe.train.batch_size,
        samples=len(data),
        validation_samples=len(validation) if validation is not None else 0,
        tokens=int(data.lengths.sum()),
        target_tokens=int(data.target_counts.sum()),
        sources=setup.prepared.report.as_json()["sources"],
        validation_sources=setup.prepared.report.as_json()["validation_sources"],
        loss=setup.context.loss.implementation,
        attention=setup.context.loaded.attention,
    )


def _tell_data(report: DataReport, journal: Journal) -> None:
    """Warn of dropped rows and of what is unusual in the sources."""
    for count in (*report.sources, *report.validation_sources):
        if count.dropped:
            number, reasons = sum(count.dropped.values()), drop_lines([count])
            more = f", and {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
            words = f"{count.name}: {number:,} of {count.read:,} rows are dropped: {', '.join(reasons[:3])}{more}"
            journal.warn("data", words, "to see the rows that are kept: tunedeck data -r RECIPE")
    for notice in report.notices:
        journal.warn("data", notice.removeprefix(WARNING))
    for line in report.overlaps:
        if line.startswith(WARNING):
            journal.warn("data", line.removeprefix(WARNING), "to see them: tunedeck data -r RECIPE --duplicates")
        else:
            journal.phase("held-out rows", line)


def log_to_stderr() -> None:
    """Log to stderr, which is redirected to engine.log; a library's repeated warning once."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    disable_progress_bars()
