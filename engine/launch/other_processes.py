"""Starts processes that are not a run: simulations, chats, and `tunedeck eval`.

A plan of a model family without a memory formula that is not in the cache is made again after a process that
may import torch (`tunedeck _simulate`) has simulated it; many variants of a plan use one process. Chats and evaluations
get an OS session of their own: a closed terminal does not end them. Leaving the console by its key ends its chats.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from engine.budget.predict.simulated import simulation_file
from engine.checks.machine import require_training_packages
from engine.config.schema.run import RunSpec
from engine.errors import EnvironmentProblem, NotSimulatedError, UsageError
from engine.journal.chats import create_chat, is_answering, list_chats
from engine.journal.directory import RunDirectory
from engine.journal.liveness import refuse_if_claimed
from engine.launch.process import ENTRY_FILE, engine_environment, record_started

SIMULATING = "{}: no memory formula for this model or its adapter; simulating a step, which takes seconds to minutes"
FREE_MEMORY = "free some host memory"
SEE_EXACT = "see its error: tunedeck plan with the same arguments and --exact --debug"

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
                    process = _start_simulation(errors)
                _simulate_one(process, spec, errors)
        finally:
            if process is not None:
                _end_simulation(process)


def _start_simulation(errors: IO[str]) -> subprocess.Popen[str]:
    require_training_packages()
    return subprocess.Popen(
        [sys.executable, "-P", str(ENTRY_FILE), "_simulate"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=engine_environment() | {"CUDA_VISIBLE_DEVICES": ""},  # no tensor of a simulation has data
    )


def _simulate_one(process: subprocess.Popen[str], spec: RunSpec, errors: IO[str]) -> None:
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
        raise EnvironmentProblem(f"{text}: it was killed, probably because host memory ran out", fix=FREE_MEMORY)
    raise EnvironmentProblem(f"{text}{_last_words(errors)}", fix=SEE_EXACT)


def _last_words(errors: IO[str]) -> str:
    """The last line of a process's stderr, less what an error advises, after a colon; empty if there is none."""
    errors.seek(0)
    lines = [line.strip() for line in errors]
    told = [line for line in lines if line and not line.startswith(("fix:", "expected:"))]
    return f": {told[-1].removeprefix('tunedeck: ')}" if told else ""


def _end_simulation(process: subprocess.Popen[str]) -> None:
    """Ends the process even in the middle of a simulation."""
    assert process.stdin is not None and process.stdout is not None
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def begin_chat(runs_dir: Path, asked: dict[str, Any], *, trust_remote_code: bool = False) -> RunDirectory:
    """Create a chat and start its process. Raises EnvironmentProblem if it cannot be started."""
    require_training_packages()
    directory = create_chat(runs_dir, asked)
    _start_chat(directory, trust_remote_code)
    return directory


def take_up_chat(directory: RunDirectory, *, trust_remote_code: bool = False) -> bool:
    """Start the process of a chat that has ended again; returns False if it still answers."""
    if is_answering(directory):
        return False
    require_training_packages()
    for path in directory.control.glob("*.json"):
        path.unlink(missing_ok=True)  # requests to the process that ended
    _start_chat(directory, trust_remote_code)
    return True


def find_chat(name: str, runs_dir: Path) -> RunDirectory:
    """The chat whose folder's name begins with `name`, or the newest for "last". Raises UsageError if none or several
    do."""
    chats = list_chats(runs_dir)
    found = chats[:1] if name == "last" else [chat for chat in chats if chat.name.startswith(name)]
    if len(found) != 1:
        raise UsageError(
            f"{len(found) or 'no'} chats in {runs_dir} start with {name!r}",
            expected="the name of a chat, or last",
            fix="tunedeck chat --list",
        )
    return found[0]


def _start_chat(directory: RunDirectory, trust_remote_code: bool) -> None:
    refuse_if_claimed(directory)
    flags = ["--trust-remote-code"] if trust_remote_code else []
    with directory.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", str(ENTRY_FILE), "_chat", str(directory.path), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=engine_environment(),
            start_new_session=True,
        )
    record_started(directory, process)
    _CHILDREN.append(process)


_CHILDREN: list[subprocess.Popen[bytes]] = []
"""Chats that this process started. They are polled when the next one is looked at, so that none stays a zombie."""


def reap_chats() -> None:
    _CHILDREN[:] = [process for process in _CHILDREN if process.poll() is None]


def end_chats() -> int:
    """End the chats that this process started and that still answer, each after the answer that it writes; returns how
    many. What was said stays, and `take_up_chat` goes on with it."""
    reap_chats()
    for process in _CHILDREN:
        process.terminate()
    return len(_CHILDREN)


class Evaluation:
    """A scoring that this process has started."""

    def __init__(self, run: RunDirectory, process: subprocess.Popen[bytes]) -> None:
        self.run, self._process = run, process

    def outcome(self) -> str | None:
        """None while it goes on; then a sentence, with the reason if it failed."""
        code = self._process.poll()
        if code is None:
            return None
        if code == 0:
            return f"{self.run.name} was scored"
        lines = (self.run.kept_scores / EVALUATION_LOG).read_text("utf-8", errors="replace").splitlines()
        reasons = [line for line in lines if line.startswith("tunedeck: ")] or lines[-1:]
        return "; ".join([f"{self.run.name} was not scored", *reasons[-1:]])


EVALUATION_LOG = "eval.log"
"""In the folder of kept scores: what the command said."""


def start_evaluation(run: RunDirectory) -> Evaluation:
    """Score the newest checkpoint. Raises EnvironmentProblem or OSError if the process cannot be started."""
    require_training_packages()
    try:
        run.kept_scores.mkdir(exist_ok=True)
        with (run.kept_scores / EVALUATION_LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", str(ENTRY_FILE), "eval", str(run.path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=engine_environment(), start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise EnvironmentProblem(
            f"{run.name} cannot be scored: {error.strerror or error}", fix="get write permission there"
        ) from error
    return Evaluation(run, process)
