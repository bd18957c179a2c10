"""Contestants of a comparison of speed, each in a process of its own. They take turns step by step while the others
are idle, so that a ratio compares the same samples within a few seconds, whatever else the machine does."""

from __future__ import annotations

import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

StepDone = Callable[[], None]
"""Called by a trainer after each optimizer step; returns when the trainer may go on."""
Contestant = Callable[[StepDone], None]
"""Trains, and calls its argument after each optimizer step. It travels to its process by pickle."""


class Seconds(NamedTuple):
    """The duration of one step in wall-clock seconds, and the processor seconds of all threads."""

    clock: float
    processor: float


class InTurn:
    """A trainer in a separate process. The process is idle until it is told to run one step."""

    def __init__(self, contestant: Contestant) -> None:
        self.steps: list[Seconds] = []
        """The duration of each step so far; the duration of the first step includes the set-up."""
        fresh = multiprocessing.get_context("spawn")
        self._pipe, theirs = fresh.Pipe()
        self._process = fresh.Process(target=_contest, args=(contestant, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def begin_step(self) -> None:
        """Let the trainer run one step."""
        self._pipe.send(None)

    def end_step(self) -> None:
        """Wait for the end of the step. Raises EOFError if the process has died."""
        self.steps.append(Seconds(*self._pipe.recv()))

    def stop(self) -> None:
        """End the process, and wait until it is gone."""
        self._pipe.close()
        self._process.join()


def take_turns(contestants: Mapping[str, Contestant], rounds: int) -> dict[str, list[Seconds]]:
    """Run `rounds` steps of each contestant, one after another; returns the duration of each step, by name."""
    running = {name: InTurn(contestant) for name, contestant in contestants.items()}
    for each in running.values():  # the first step includes the set-up, which all may do at the same time
        each.begin_step()
    for each in running.values():
        each.end_step()
    for number in range(1, rounds):
        # Reverse the order in every other round, so that no trainer always runs after the same one.
        for each in list(running.values())[:: 1 if number % 2 else -1]:
            each.begin_step()
            each.end_step()
    for each in running.values():
        each.stop()
    return {name: each.steps for name, each in running.items()}


def _contest(contestant: Contestant, pipe: Connection) -> None:
    """Main function of a contestant's process: after each step, send the step's `Seconds` and wait for a message to
    continue. The process ends when the pipe is closed."""
    be_quiet()
    pipe.recv()
    began = Seconds(time.perf_counter(), time.process_time())

    def step_done() -> None:
        nonlocal began
        pipe.send((time.perf_counter() - began.clock, time.process_time() - began.processor))
        try:
            pipe.recv()
        except EOFError:  # The comparison is over.
            raise SystemExit from None
        began = Seconds(time.perf_counter(), time.process_time())

    contestant(step_done)


class StepEnd(TrainerCallback):
    """A Trainer callback that calls `step_done` at the end of each optimizer step, before the next batches are
    fetched."""

    def __init__(self, step_done: StepDone) -> None:
        self._step_done = step_done

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._step_done()


def quartiles(ratios: Iterable[float]) -> list[float]:
    """Returns [median, lower quartile, upper quartile] of the ratios."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [round(middle, 3), round(low, 3), round(high, 3)]


def be_quiet() -> None:
    """Silence warnings, progress bars and log messages."""
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
