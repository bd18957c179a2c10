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
    with claim(place), EventWriter(place) as writer, beating(writer):
        journal = Journal(writer)
        wishes = Wishes(ControlInbox(place), writer, spec.limits.max_hours)
        with wishes.listening():
            status, code = _recorded(spec, place, journal, wishes, resume or from_step is not None, from_step)
    _on_finish(spec, place, status)
    return code


def _recorded(
    spec: RunSpec, place: RunDirectory, journal: Journal, wishes: Wishes, resume: bool, from_step: int | None
) -> tuple[str, int]:
    """Train, and write `run_finished` however it ends; returns (status, exit code)."""
    ending = Ending("failed", "")
    error: str | None = None
    facts: dict[str, Any] = {}
    try:
        ending, facts = _train(spec, place, journal, wishes, resume, from_step)
        status, code = ending.status, EXIT_CODES[ending.status]
    except TunedeckError as failure:
        traceback.print_exc()
        status = "oom" if isinstance(failure, MemoryExhaustedError) else "failed"
        code, error = failure.exit_code, failure.render()
    except Exception as failure:  # noqa: BLE001  (the process boundary: a defect ends the run with a record of it)
        traceback.print_exc()
        found = classify(failure)
        status, code = ("oom", MemoryExhaustedError.exit_code) if found else ("failed", 1)
        error = TunedeckError(
            f"{'' if found else 'unexpected '}{type(failure).__name__}: {failure}",
            fix=f"the traceback is in the run's log: tunedeck log {place.name}",
        ).render()
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


def _train(
    spec: RunSpec, place: RunDirectory, journal: Journal, wishes: Wishes, resume: bool, from_step: int | None
) -> tuple[Ending, dict[str, Any]]:
    device = _open(spec, journal, wishes)
    _tell_start(spec, place, journal, device, resume)
    with device.activate():
        reserve = HostReserve()
        reports = OomReports(place, device, lambda: spec)
        bench = set_up(spec, device, journal, reporter(journal, device, reports))
        reports.spec = lambda: as_it_stands(bench.spec, bench.parts.loaded, bench.parts.loss, bench.parts.guard)
        training = Training(bench, place, journal, wishes, reserve)
        _tell_stage(training, journal)
        if resume:
            training.resume(from_step)
        with quick_to_collect(), _checkpoint_on_failure(training):
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
def _checkpoint_on_failure(training: Training) -> Iterator[None]:
    """Keep the last finished step when a run ends for want of memory or because it diverged."""
    try:
        yield
    except (MemoryExhaustedError, DivergedError):
        if training.state.step and training.sound:
            training.save("before giving up")
        raise


def _tell_start(spec: RunSpec, place: RunDirectory, journal: Journal, device: Device, resume: bool) -> None:
    journal.write(
        "run_started",
        run=place.name,
        pid=os.getpid(),
        world_size=1,
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
