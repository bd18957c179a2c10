"""Starts simulations, which predict the memory of model families for which the budget has no formula (closed form).

A plan that needs one that is not in the cache is made again after a process that may import torch (`tunedeck
_simulate`) has made it; many variants of a plan use one process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO, TypeVar

from engine.budget.predict.simulated import simulation_file
from engine.config.schema.run import RunSpec
from engine.errors import EnvironmentProblem, NotSimulatedError
from engine.launch.process import ENTRY_FILE, engine_environment
from engine.launch.requirements import require_training_packages

SIMULATING = "{}: its family has no closed form, so a step is simulated, which takes seconds to minutes"
FREE_MEMORY = "free some host memory"
SEE_EXACT = "see what a step of it says: tunedeck plan with the same arguments and --exact --debug"

Planned = TypeVar("Planned")


def with_simulations(plan: Callable[[], Planned], announce: Callable[[str], None] = lambda text: None) -> Planned:
    """What `plan` returns, after making every simulation for which it raises NotSimulatedError. `announce` is called
    with a sentence for the user before the first one. Raises EnvironmentProblem: packages for training are not
    installed, or a simulation ended without a result."""
    process: subprocess.Popen[str] | None = None
    # In memory: nearly every plan is made without a simulation, and none must fail because the disk is full.
    with os.fdopen(os.memfd_create("simulation"), "w+", encoding="utf-8", errors="replace") as errors:
        try:
            while True:
                try:
                    return plan()
                except NotSimulatedError as missing:
                    spec = missing.spec
                    assert isinstance(spec, RunSpec)
                if process is None:
                    announce(SIMULATING.format(spec.recipe.model.id))
                    process = _start(errors)
                _simulate(process, spec, errors)
        finally:
            if process is not None:
                _end(process)


def _start(errors: IO[str]) -> subprocess.Popen[str]:
    require_training_packages()
    return subprocess.Popen(
        [sys.executable, "-P", str(ENTRY_FILE), "_simulate"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=engine_environment() | {"CUDA_VISIBLE_DEVICES": ""},  # no tensor of a simulation has data
    )


def _simulate(process: subprocess.Popen[str], spec: RunSpec, errors: IO[str]) -> None:
    """Let `process`, whose stderr is `errors`, simulate the run and cache the result. Raises EnvironmentProblem if
    nothing was cached."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(spec.model_dump_json(by_alias=True) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if answer and simulation_file(spec).exists():
        return
    text = f"the simulation of {spec.recipe.model.id} ended without a result"
    if not answer and process.wait() == -signal.SIGKILL:
        raise EnvironmentProblem(f"{text}: it was killed, as the kernel does without free memory", fix=FREE_MEMORY)
    raise EnvironmentProblem(f"{text}{_last_words(errors)}", fix=SEE_EXACT)


def _last_words(errors: IO[str]) -> str:
    """The last line of a process's stderr, less what an error advises, after a colon; empty if there is none."""
    errors.seek(0)
    lines = [line.strip() for line in errors]
    told = [line for line in lines if line and not line.startswith(("fix:", "expected:"))]
    return f": {told[-1].removeprefix('tunedeck: ')}" if told else ""


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process even in the middle of a simulation."""
    assert process.stdin is not None and process.stdout is not None
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
