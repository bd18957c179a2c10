"""Trains the steps of a run with the engine's own set-up, loop and recovery, and writes no checkpoint and no result.

A model with random weights is kept beside its adapter, so each run of a 7B model would write 15 GB: minutes that say
nothing about memory or speed. Everything else is as in `engine.train.run.main`.

Run: python -m benchmarks.measured_run RUN_DIRECTORY        (started by `benchmarks.gpu_runs`)
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from engine.config.load import load_run_spec
from engine.config.schema.run import RunSpec
from engine.device.base import Device
from engine.device.oom import frozen_gc
from engine.device.open import open_device
from engine.errors import TunedeckError
from engine.journal.control import RunRequests
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, Journal
from engine.train.run.checkpoints import EmergencyHostMemory
from engine.train.run.loop import Training
from engine.train.run.main import log_to_stderr
from engine.train.run.measured import calibrate
from engine.train.run.oom_report import OomReports, oom_reporter
from engine.train.run.run_context import RunContext, Watchdog
from engine.train.run.setup import set_up
from engine.verify.verify import prove


def measure(place: RunDirectory) -> int:
    """Train the run in `place`; returns the exit code that the engine would return. The journal says what happened."""
    spec = load_run_spec(place.run_toml, own=True)
    with EventWriter(place) as writer:
        journal = Journal(writer)
        try:
            device = open_device(spec)
            with device.activate():
                journal.write_notices(device.fit_capacity())
                _train(spec, place, device, journal)
        except TunedeckError as error:
            traceback.print_exc()
            journal.write("run_finished", status="failed", exit_code=error.exit_code, result=None, error=error.render())
            return error.exit_code
    return 0


def _train(spec: RunSpec, place: RunDirectory, device: Device, journal: Journal) -> None:
    emergency_memory = EmergencyHostMemory()
    report = oom_reporter(journal, device, OomReports(place, device, lambda: spec))
    setup = set_up(spec, device, journal, report)
    prove(setup, journal)
    run = RunContext(place, journal, RunRequests(None, None, None), Watchdog(journal, 600.0))
    training = Training(setup, run, emergency_memory)
    with frozen_gc():
        training.probe()
        while training.state.step < setup.total_steps:
            training.one_step()
    calibrate(device, 1, training.probe_memory, journal)
    journal.write(
        "run_finished",
        status="done",
        exit_code=0,
        result=None,
        measured=training.measured(),
        samples_lost=training.samples_lost,
    )


if __name__ == "__main__":
    log_to_stderr()
    sys.exit(measure(RunDirectory(Path(sys.argv[1]))))
