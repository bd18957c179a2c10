"""The engine process: from a run directory to an exit code. Everything it tells goes into the journal and its log.

It knows nothing of who started it. Try: `tunedeck train -p demo -r demo --detach`, then `tunedeck log last`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine.device import open_device
from engine.device.base import Device
from engine.device.oom import classify
from engine.errors import DeviceBusyError, DivergedError, MemoryExhaustedError, TunedeckError
from engine.journal.control import ControlInbox
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.heartbeat import beating
from engine.journal.liveness import claim
from engine.model.quiet import without_bars
from engine.parallel.launch import (
    BEYOND_REPAIR_CODE,
    LOST_CODE,
    device_count,
    is_rank,
    of_one_rank,
    settle_as_rank,
    supervise,
)
from engine.parallel.ranks import ALONE, Ranks, joined
from engine.parallel.votes import LostRankError
from engine.spec.load import load_run_spec
from engine.spec.run import RunSpec
from engine.train.control import Wishes
from engine.train.failure import quick_to_collect
from engine.train.journal import Journal
from engine.train.loop import Ending, Training
from engine.train.oom_report import OomReports, as_it_stands
from engine.train.report import reporter
from engine.train.reserve import HostReserve
from engine.train.setup import set_up

PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets")
WAIT_POLL_SECONDS = 5.0
EXIT_CODES = {"done": 0, "stopped": 130, "paused": 130}

log = logging.getLogger("tunedeck")


def run(directory: Path, *, resume: bool = False, from_step: int | None = None) -> int:
    """Train the run in `directory`, or go on with it; returns the exit code."""
    _log_to_stderr()
    place = RunDirectory(directory)
    spec = load_run_spec(place.run_toml, own=True)
    resume = resume or from_step is not None
    if is_rank(place):
        return _run_rank(spec, place, resume, from_step)
    with claim(place):
        if device_count(spec) > 1:
            status, code = supervise(spec, place, resume=resume, from_step=from_step)
        else:
            status, code = _run_first(spec, place, ALONE, resume, from_step)
    _on_finish(spec, place, status)
    return code


def _run_rank(spec: RunSpec, place: RunDirectory, resume: bool, from_step: int | None) -> int:
    """One rank of several. The run's exit code is in the journal; a rank's own only says whether to try again."""
    settle_as_rank(place, int(os.environ["RANK"]))
    try:
        with joined(spec.profile.parallel.timeout_seconds, spec.profile.device.kind) as ranks:
            if ranks.is_first:
                _run_first(spec, place, ranks, resume, from_step)
                ranks.say_over()
            else:
                _run_other(spec, place, ranks, resume, from_step)
    except LostRankError:
        traceback.print_exc()
        return LOST_CODE
    except torch.AcceleratorError:
        traceback.print_exc()
        return BEYOND_REPAIR_CODE
    return 0


def _run_first(
    spec: RunSpec, place: RunDirectory, ranks: Ranks, resume: bool, from_step: int | None
) -> tuple[str, int]:
    """The process that writes events: the only one, or rank 0."""
    with EventWriter(place) as writer, beating(writer):
        wishes = Wishes(ControlInbox(place), writer, spec.limits.max_hours)
        with wishes.listening():
            return _recorded(spec, place, Journal(writer), wishes, ranks, resume, from_step)


def _run_other(spec: RunSpec, place: RunDirectory, ranks: Ranks, resume: bool, from_step: int | None) -> None:
    """Any rank but the first: what it gives up for is left to rank 0 to record."""
    wishes = Wishes(None, None, None)
    try:
        with wishes.listening():
            _train(spec, place, Journal(None), wishes, ranks, resume, from_step)
    except (LostRankError, torch.AcceleratorError):
        raise
    except Exception as failure:  # noqa: BLE001  (the process boundary: a defect ends the run with a record of it)
        traceback.print_exc()
        status, code, error = _described(failure, place)
        ranks.note_error({"status": status, "exit_code": code, "error": error})


def _recorded(
    spec: RunSpec,
    place: RunDirectory,
    journal: Journal,
    wishes: Wishes,
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
        ending, facts = _train(spec, place, journal, wishes, ranks, resume, from_step)
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
    wishes: Wishes,
    ranks: Ranks,
    resume: bool,
    from_step: int | None,
) -> tuple[Ending, dict[str, Any]]:
    device = _open(of_one_rank(spec, ranks.local_rank), journal, wishes)
    _tell_start(spec, place, journal, device, ranks, resume)
    with device.activate():
        reserve = HostReserve()
        reports = OomReports(place, device, lambda: spec)
        bench = set_up(spec, device, journal, reporter(journal, device, reports if ranks.is_first else None), ranks)
        reports.spec = lambda: as_it_stands(bench.spec, bench.parts.loaded, bench.parts.loss, bench.parts.guard)
        training = Training(bench, place, journal, wishes, reserve)
        _tell_stage(training, journal)
        if resume:
            training.resume(from_step)
        with quick_to_collect(), _checkpoint_on_failure(training, ranks):
            ending = training.run()
        return ending, {"measured": training.measured(), "samples_lost": training.samples_lost}


def _open(spec: RunSpec, journal: Journal, wishes: Wishes) -> Device:
    """The device; with `--wait`, asked for again until it is free, the time is up, or a stop is wished for."""
    deadline = time.monotonic() + (spec.limits.wait_seconds or 0.0)
    while True:
        try:
            return open_device(spec)
        except DeviceBusyError as busy:
            if time.monotonic() >= deadline or wishes.look():
                raise
            journal.phase("waiting for the device", busy.found)
        time.sleep(min(WAIT_POLL_SECONDS, max(0.0, deadline - time.monotonic())))


@contextmanager
def _checkpoint_on_failure(training: Training, ranks: Ranks) -> Iterator[None]:
    """Keep the last finished step when a run ends for want of memory or because it diverged."""
    try:
        yield
    except (MemoryExhaustedError, DivergedError):
        if ranks.is_first and training.state.step and training.sound:
            training.save("before giving up")
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
    bench = training.bench
    data, validation = bench.prepared.train, bench.prepared.validation
    journal.write(
        "stage_started",
        max_steps=bench.total_steps,
        batch_size=bench.spec.recipe.train.batch_size,
        samples=len(data),
        validation_samples=len(validation) if validation is not None else 0,
        tokens=int(data.lengths.sum()),
        target_tokens=int(data.target_counts.sum()),
        loss=bench.parts.loss.implementation,
    )


def _on_finish(spec: RunSpec, place: RunDirectory, status: str) -> None:
    """Run the user's own --on-finish command; its failure is logged and changes nothing."""
    if not spec.limits.on_finish:
        return
    environment = {**os.environ, "TUNEDECK_RUN": str(place.path), "TUNEDECK_STATUS": status}
    done = subprocess.run(spec.limits.on_finish, shell=True, env=environment, check=False)
    log.info("--on-finish ended with %d", done.returncode)


def _log_to_stderr() -> None:
    """stderr is engine.log. Warnings of libraries go there once each."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    without_bars()
