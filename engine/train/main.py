"""The engine process: from a run directory to an exit code. Everything it tells goes into the journal and its log.

It knows nothing of who started it. Try: `tunedeck train -p demo -r demo --detach`, then `tunedeck log last`.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine.device import open_device
from engine.device.base import Device
from engine.device.catch_oom import frozen_gc
from engine.device.oom import classify
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
from engine.distributed.host_gather import LostRankError
from engine.distributed.ranks import SINGLE_PROCESS, Ranks, process_group
from engine.errors import DeviceBusyError, DivergedError, MemoryExhaustedError, TunedeckError
from engine.journal.control import ControlInbox
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.heartbeat import heartbeats
from engine.journal.liveness import claim
from engine.launch.on_finish import run_on_finish
from engine.model.library_output import disable_progress_bars
from engine.spec.load import load_run_spec
from engine.spec.schema.run import RunSpec
from engine.train.loop import Ending, Training
from engine.train.monitor.calibrate import calibrate
from engine.train.monitor.journal import Journal
from engine.train.recovery.emergency_memory import EmergencyHostMemory
from engine.train.recovery.memory_settings import effective_spec
from engine.train.recovery.oom_report import OomReports, oom_reporter
from engine.train.run_requests import RunRequests
from engine.train.setup import set_up

PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets")
WAIT_POLL_SECONDS = 5.0
EXIT_CODES = {"done": 0, "stopped": 130, "paused": 130}

log = logging.getLogger("tunedeck")


def run(directory: Path, *, resume: bool = False, from_step: int | None = None) -> int:
    """Train the run in `directory`, or go on with it; returns the exit code."""
    log_to_stderr()
    place = RunDirectory(directory)
    spec = load_run_spec(place.run_toml, own=True)
    resume = resume or from_step is not None
    if is_rank(place):
        return _run_rank(spec, place, resume, from_step)
    with claim(place):
        status, code = run_first(spec, place, SINGLE_PROCESS, resume, from_step)
    run_on_finish(spec, place, status)
    return code


def _run_rank(spec: RunSpec, place: RunDirectory, resume: bool, from_step: int | None) -> int:
    """One rank of several. The run's exit code is in the journal; a rank's own only says whether to try again."""

    def work(ranks: Ranks) -> int:
        if ranks.is_rank0:
            run_first(spec, place, ranks, resume, from_step)
            ranks.mark_finished()
        else:
            run_other(spec, place, ranks, resume, from_step)
        return 0

    set_up_rank_process(place, int(os.environ["RANK"]))
    code = as_rank(spec, work)
    return exit_without_cleanup(code) if code else code


def as_rank(
    spec: RunSpec, work: Callable[[Ranks], int], tell: Callable[[Exception], None] = traceback.print_exception
) -> int:
    """Join the other ranks and do `work`; its exit code, or the one that says what made this rank unable to go on, of
    which `tell` is told. The process must not be tidied up then: see `exit_without_cleanup`."""
    device = spec.profile.device.kind
    try:
        with process_group(spec.profile.parallel.timeout_seconds, device, own_device(spec, local_rank())) as ranks:
            return work(ranks)
    except LostRankError as error:
        tell(error)
        return LOST_CODE
    except torch.AcceleratorError as error:
        tell(error)
        return BEYOND_REPAIR_CODE


def run_first(
    spec: RunSpec, place: RunDirectory, ranks: Ranks, resume: bool, from_step: int | None
) -> tuple[str, int]:
    """The process that writes events: the only one, or rank 0."""
    with EventWriter(place) as writer, heartbeats(writer):
        requests = RunRequests(ControlInbox(place), writer, spec.limits.max_hours)
        with requests.listening():
            return _recorded(spec, place, Journal(writer), requests, ranks, resume, from_step)


def run_other(spec: RunSpec, place: RunDirectory, ranks: Ranks, resume: bool, from_step: int | None) -> int:
    """Any rank but the first: what it gives up for is left to rank 0 to record. Returns the exit code."""
    requests = RunRequests(None, None, None)
    try:
        with requests.listening():
            ending, _ = _train(spec, place, Journal(None), requests, ranks, resume, from_step)
            return EXIT_CODES[ending.status]
    except (LostRankError, torch.AcceleratorError):
        raise
    except Exception as failure:  # noqa: BLE001  (the process boundary: a defect ends the run with a record of it)
        traceback.print_exc()
        status, code, error = _described(failure, place)
        ranks.note_error({"status": status, "exit_code": code, "error": error})
        return code


def _recorded(
    spec: RunSpec,
    place: RunDirectory,
    journal: Journal,
    requests: RunRequests,
    ranks: Ranks,
    resume: bool,
    from_step: int | None,
) -> tuple[str, int]:
    """Train, and write `run_finished` however it ends; returns (status, exit code). A lost rank is no end of the run,
    unless it left word of why it gave up."""
    ending = Ending("failed", "")
    error: str | None = None
    facts: dict[str, Any] = {}
    try:
        ending, facts = _train(spec, place, journal, requests, ranks, resume, from_step)
        status, code = ending.status, EXIT_CODES[ending.status]
    except LostRankError:
        noted = ranks.noted_error()
        if noted is None:
            raise
        traceback.print_exc()
        status, code, error = noted["status"], noted["exit_code"], f"rank {noted['rank']}: {noted['error']}"
    except Exception as failure:
        if ranks.size > 1 and isinstance(failure, torch.AcceleratorError):
            raise
        traceback.print_exc()
        status, code, error = _described(failure, place)
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


def _described(failure: Exception, place: RunDirectory) -> tuple[str, int, str]:
    """(status, exit code, what to tell) for what ended the run."""
    if isinstance(failure, TunedeckError):
        status = "oom" if isinstance(failure, MemoryExhaustedError) else "failed"
        return status, failure.exit_code, failure.render()
    found = classify(failure)
    status, code = ("oom", MemoryExhaustedError.exit_code) if found else ("failed", 1)
    error = TunedeckError(
        f"{'' if found else 'unexpected '}{type(failure).__name__}: {failure}",
        fix=f"the traceback is in the run's log: tunedeck log {place.name}",
    )
    return status, code, error.render()


def _train(
    spec: RunSpec,
    place: RunDirectory,
    journal: Journal,
    requests: RunRequests,
    ranks: Ranks,
    resume: bool,
    from_step: int | None,
) -> tuple[Ending, dict[str, Any]]:
    device = _open(spec_of_rank(spec, ranks.local_rank), journal, requests, ranks)
    _tell_start(spec, place, journal, device, ranks, resume)
    with device.activate():
        emergency_memory = EmergencyHostMemory()
        reports = OomReports(place, device, lambda: spec)
        report = oom_reporter(journal, device, reports if ranks.is_rank0 else None)
        setup = set_up(spec, device, journal, report, ranks)
        reports.spec = lambda: effective_spec(setup.spec, setup.context)
        training = Training(setup, place, journal, requests, emergency_memory)
        _tell_stage(training, journal)
        if resume:
            training.resume(from_step)
        with (
            frozen_gc(),
            training.watchdog.watching(),
            _checkpoint_on_failure(training, ranks),
        ):
            ending = training.run()
        if ranks.is_rank0:
            peak_bytes = training.peak.peak_bytes if training.peak else 0
            calibrate(device, spec.profile, ranks.size, peak_bytes, journal)
        return ending, {"measured": training.measured(), "samples_lost": training.samples_lost}


def _open(spec: RunSpec, journal: Journal, requests: RunRequests, ranks: Ranks) -> Device:
    """The device; with `--wait`, asked for again until it is free on every rank, the time is up, or a stop is wished
    for. Ranks that have theirs wait with those that do not."""
    deadline = time.monotonic() + (spec.limits.wait_seconds or 0.0)
    device: Device | None = None
    while True:
        busy: DeviceBusyError | None = None
        try:
            device = device or open_device(spec)
        except DeviceBusyError as error:
            busy = error
        seconds_left = deadline - time.monotonic()
        waits_for, over = agreed(ranks, busy, seconds_left <= 0 or requests.look())
        if device is not None and not waits_for:
            return device
        if over:
            raise busy or DeviceBusyError(waits_for, fix="end what holds it, or wait longer with --wait SECONDS")
        journal.phase("waiting for the device", waits_for)
        time.sleep(max(0.0, min(WAIT_POLL_SECONDS, seconds_left)))


def agreed(ranks: Ranks, busy: DeviceBusyError | None, over: bool) -> tuple[str, bool]:
    """Whose device is busy, in words, and whether rank 0 has waited long enough."""
    told = ranks.all_gather_object([busy.found if busy else "", over])
    words = [f"rank {rank}: {found}" if ranks.size > 1 else found for rank, (found, _) in enumerate(told) if found]
    return "; ".join(words), told[0][1]


@contextmanager
def _checkpoint_on_failure(training: Training, ranks: Ranks) -> Iterator[None]:
    """Keep the last finished step when a run ends for want of memory or because it diverged."""
    try:
        yield
    except (MemoryExhaustedError, DivergedError):
        # Where weights are spread over ranks all of them raise the same error, and saving takes all of them.
        saves = ranks.is_rank0 or training.context.strategy.all_ranks_save
        if saves and training.state.step and training.sound:
            training.checkpoints.save("before giving up")
        raise


def _tell_start(
    spec: RunSpec, place: RunDirectory, journal: Journal, device: Device, ranks: Ranks, resume: bool
) -> None:
    journal.write(
        "run_started",
        run=place.name,
        pid=os.getpid(),
        world_size=ranks.size,
        versions={package: version(package) for package in PACKAGES},
        device=device.kind,
        device_name=device.name,
        simulated=device.simulated,
        capacity_bytes=device.capacity_bytes,
        resumed=resume,
        seed=spec.recipe.train.seed,
    )
    for notice in device.notices:
        journal.warn("device", notice)


def _tell_stage(training: Training, journal: Journal) -> None:
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
        loss=setup.context.loss.implementation,
    )


def log_to_stderr() -> None:
    """stderr is engine.log. Warnings of libraries go there once each."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    disable_progress_bars()
