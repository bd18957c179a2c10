"""Starts simulations, which predict the memory of model families for which the budget has no formula (closed form).

`with_simulations` calls a function that plans. If the function needs a simulation that is not in this machine's cache,
a process that may import torch makes it (`tunedeck _simulate`), and the function is called again. A caller that plans
many variants, such as `fit`, gets all of them from one process, which imports torch once.

Try: `tunedeck plan -p 80gb -r lora --set model.id=facebook/opt-1.3b`
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

from engine.budget.predict.simulated import simulation_file
from engine.errors import EnvironmentProblem, NotSimulatedError
from engine.launch.process import ENTRY_FILE, engine_environment
from engine.launch.training_packages import require_training_packages
from engine.spec.schema.run import RunSpec

SIMULATING = "{}: its family has no closed form, so a step is simulated, which takes some seconds"

Planned = TypeVar("Planned")


def with_simulations(plan: Callable[[], Planned], announce: Callable[[str], None] = lambda text: None) -> Planned:
    """Return what `plan` returns, after making every simulation for which it raises NotSimulatedError. `announce` is
    called with a sentence for the user before the first simulation.

    Raises:
        EnvironmentProblem: the packages for training are not installed, or a simulation ended without a result.
    """
    process: subprocess.Popen[str] | None = None
    try:
        while True:
            try:
                return plan()
            except NotSimulatedError as missing:
                spec = missing.spec
                assert isinstance(spec, RunSpec)
            if process is None:
                announce(SIMULATING.format(spec.recipe.model.id))
                process = _start()
            _simulate(process, spec)
    finally:
        if process is not None:
            _end(process)


def _start() -> subprocess.Popen[str]:
    require_training_packages()
    return subprocess.Popen(
        [sys.executable, "-P", str(ENTRY_FILE), "_simulate"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=engine_environment() | {"CUDA_VISIBLE_DEVICES": ""},  # no tensor of a simulation has data
    )


def _simulate(process: subprocess.Popen[str], spec: RunSpec) -> None:
    """Let `process` simulate the run `spec` and put the result into the cache. Raises EnvironmentProblem if
    nothing was put there."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(spec.model_dump_json(by_alias=True) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer or not simulation_file(spec).exists():
        raise EnvironmentProblem(
            f"the simulation of {spec.recipe.model.id} ended without a result",
            fix="free some host memory, or see what it says: tunedeck plan with the same arguments and --exact --debug",
        )


def _end(process: subprocess.Popen[str]) -> None:
    """End the process that simulates, even in the middle of a simulation."""
    assert process.stdin is not None and process.stdout is not None
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()

