"""Every allocation fails once: `make torture`, and the sweeps from which `make test` runs a seeded sample.

A unit of work (the probe, a step, an evaluation, a checkpoint, a whole run) is repeated from the same state, and each
time another of its allocations is refused. Afterwards these must hold: each failure has one line in the journal; no
more bytes are held when that line is written than without failures; the result equals the undisturbed one, bit for bit
after remedies that keep the arithmetic (SAME_RESULT), else to 1e-5.

Not a test module. Try: `python -m tests.train.torture --sample 20`
"""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.device.metered import MeteredDevice
from engine.device.oom import frozen_gc
from engine.model.config import disable_progress_bars
from tests.conftest import FOLDERS
from tests.torture_table import record
from tests.train.fault_rig import STEP, UNITS, Case, Result, Rig, Unit, rigged
from tests.train.image_cases import IMAGE_CASES

SAME_RESULT = {"retry", "defragment", "checkpointing", "reload"}
"""Remedies that leave every bit of the result as it is."""
TOLERANCE = 1e-5


def complaints(result: Result, reference: Result, faults: int) -> list[str]:
    """What is wrong with the result of a disturbed unit, in words; empty if nothing is."""
    found = []
    if len(result.failures) != faults:
        found.append(f"{len(result.failures)} journal lines for {faults} failures")
    for event in result.failures:
        if event["held_bytes"] != reference.held_bytes:
            found.append(f"{event['held_bytes'] - reference.held_bytes} bytes left over after {event['phase']}")
    if result.held_bytes != reference.held_bytes:
        found.append(f"{result.held_bytes - reference.held_bytes} bytes left over at the end")
    exact = {event["remedy"] for event in result.failures} <= SAME_RESULT
    off = [name for name, value in reference.tensors.items() if not _same(result.tensors[name], value, exact)]
    if off:
        found.append(f"{len(off)} tensors differ, such as {off[0]} (exact: {exact})")
    odd = [name for name, value in reference.facts.items() if not _alike(result.facts.get(name), value, exact)]
    found += [f"{name} is {result.facts.get(name)!r}, not {reference.facts[name]!r}" for name in odd]
    return found


def _same(one: torch.Tensor, other: torch.Tensor, exact: bool) -> bool:
    return torch.equal(one, other) if exact else torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def _alike(one: Any, other: Any, exact: bool) -> bool:
    if exact or not isinstance(one, float):
        return bool(one == other)
    return bool(abs(one - other) <= TOLERANCE * max(1.0, abs(other)))


@dataclass
class Tally:
    """The outcome of a sweep: the number of faults tried, and what was wrong after them."""

    name: str
    faults: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, what: str, result: Result, reference: Result, faults: int = 1) -> None:
        """Judge one disturbed unit."""
        self.faults += faults
        self.wrong += [f"{self.name}, {what}: {text}" for text in complaints(result, reference, faults)]

    def __str__(self) -> str:
        verdict = f"{len(self.wrong)} WRONG" if self.wrong else "all survived"
        return f"{self.name:<34} {self.faults:>6} faults   {verdict}   {self.seconds:.0f} s"


TRAPS: dict[str, Callable[[MeteredDevice, int], None]] = {
    "device": lambda device, allocation: device.fail_at(allocation),
    "host": lambda device, allocation: device.fail_host_at(allocation),
}


def _spring(trap: Callable[[MeteredDevice, int], None], allocation: int, device: MeteredDevice) -> None:
    trap(device, allocation)


def _fail_twice(first: int, second: int, device: MeteredDevice) -> None:
    device.fail_at(first, second)


@contextmanager
def tallied(name: str) -> Iterator[Tally]:
    """Yield a tally, and measure the time that the block takes. Existing objects are excluded from garbage collection
    in the block, because a collection follows every fault."""
    tally, began = Tally(name), time.monotonic()
    with frozen_gc():
        yield tally
    tally.seconds = time.monotonic() - began


def sweep(rig: Rig, unit: Unit, name: str, sample: int | None, draw: random.Random) -> Tally:
    """Fail allocations of `unit` on the device and on the host one by one: all of them, or `sample` of each kind."""
    reference = rig.perform(unit)
    counts = {"device": reference.allocations, "host": reference.host_allocations}
    with tallied(f"{name}: {unit.name}") as tally:
        for where, spring in TRAPS.items():
            for allocation in chosen(counts[where], sample, draw):
                result = rig.perform(unit, partial(_spring, spring, allocation))
                tally.add(f"{where} allocation {allocation} of {counts[where]}", result, reference)
    return tally


def sweep_pairs(rig: Rig, unit: Unit, name: str, sample: int | None, draw: random.Random) -> Tally:
    """Make two allocations fail in one unit: the `first`, and then the `second` of those that follow, in the recovery
    or in the next attempt. All pairs, or `sample` random ones."""
    reference = rig.perform(unit)
    count = reference.allocations
    with tallied(f"{name}: pairs in a {unit.name}") as tally:
        for number in chosen(count * count, sample, draw):
            first, second = (number - 1) // count + 1, (number - 1) % count + 1
            result = rig.perform(unit, partial(_fail_twice, first, second))
            tally.add(f"allocations {first} and then {second} of {count}", result, reference, faults=2)
    return tally


def sweep_set_up(case: Case, folder: Path, sample: int | None, draw: random.Random) -> Tally:
    """Fail allocations of loading the model and of making optimizer state; each time a new engine is set up."""
    numbers = iter(range(10**9))
    levels = {"load": 0}  # phase = what is held before it

    def set_up_and_step(disturb: Callable[[MeteredDevice], None]) -> Result:
        with rigged(case, folder / str(next(numbers)), disturb) as rig:
            result = rig.perform(STEP)
            levels["optimizer_state"] = result.held_bytes - rig.optimizer_bytes
            return replace(result, failures=rig.set_up_failures, allocations=rig.set_up_allocations)

    reference = set_up_and_step(lambda device: None)
    with tallied(f"{case.name}: set-up") as tally:
        for allocation in chosen(reference.allocations, sample, draw):
            result = set_up_and_step(partial(_spring, MeteredDevice.fail_at, allocation))
            for event in result.failures:
                event["held_bytes"] += reference.held_bytes - levels[event["phase"]]
            tally.add(f"allocation {allocation} of {reference.allocations}", result, reference)
    return tally


def chosen(count: int, sample: int | None, draw: random.Random) -> list[int]:
    """Which of the numbers 1 to `count` to take."""
    every = range(1, count + 1)
    return list(every) if sample is None or sample >= count else sorted(draw.sample(every, sample))


CASES = tuple(
    Case(f"{method}, {'recomputed' if checkpointing else 'kept'} activations", method, checkpointing)
    for method in ("full", "lora")
    for checkpointing in (False, True)
)
PAIR_CASES = (
    Case("dpo, lora, whole pairs", "lora", preference="dpo"),
    Case("ipo, full, one sequence at a time", "full", rows=1, preference="ipo"),
    Case("kto, lora", "lora", preference="kto"),
)
SMALLER = (
    *(Case(f"{method}, one layer", method, layers=1, width=8, batch=2) for method in ("full", "lora")),
    Case("lora, tiled MLP", "lora", checkpointing=True, layers=1, width=8, batch=2, train={"mlp_tiles": 3}),
)
ROUNDING_CASES = tuple(
    Case(f"bf16, {name}", "full", layers=1, width=8, dtype="bfloat16", train=train, ladder=("retry", "defragment"))
    for name, train in {
        "exact": {"rounding": "exact"},
        "stochastic": {"rounding": "stochastic"},
        "stochastic, state in bf16": {"rounding": "stochastic", "state_dtype": "bfloat16"},
        "exact, adafactor": {"rounding": "exact", "optimizer": "adafactor"},
    }.items()
)
"""Weights in bf16. Without remedies that change the split, every bit of the result must be the same."""
OPTIMIZER_CASES = tuple(
    Case(name, "full", layers=1, width=8, torch_optimizer=options)
    for name, options in {
        "adamw, foreach": {"kind": "AdamW", "foreach": True},
        "adamw, one by one": {"kind": "AdamW", "foreach": False, "fused": False},
        "sgd, foreach": {"kind": "SGD", "momentum": 0.9, "foreach": True},
        "adafactor": {"kind": "Adafactor", "foreach": False},
    }.items()
)
"""Optimizers that allocate inside their step."""


def jobs() -> Iterator[tuple[str, Case]]:
    """(kind of sweep, case) of the whole torture, the longest first."""
    yield from (("pairs", case) for case in SMALLER)
    yield from (("units", case) for case in (*IMAGE_CASES, *CASES, *PAIR_CASES))
    yield from (("set-up", case) for case in CASES)
    yield from (("optimizer", case) for case in (*OPTIMIZER_CASES, *ROUNDING_CASES))


def run_job(kind: str, case: Case, sample: int | None, seed: int) -> list[Tally]:
    """Run one kind of sweep over a case, with temporary folders for its files."""
    draw = random.Random(f"{seed} {kind} {case.name}")
    with tempfile.TemporaryDirectory() as folder:
        if kind == "set-up":
            return [sweep_set_up(case, Path(folder), sample, draw)]
        with rigged(case, Path(folder)) as rig:
            if kind == "pairs":
                return [sweep_pairs(rig, STEP, case.name, sample, draw)]
            if kind == "optimizer":
                return [sweep(rig, STEP, case.name, sample, draw)]
            return [sweep(rig, unit, case.name, sample, draw) for unit in UNITS]


def main() -> int:
    """Run every sweep and print what was tried; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, help="faults of each kind in each unit, instead of every one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    tallies: list[Tally] = []
    with ProcessPoolExecutor(asked.processes, multiprocessing.get_context("spawn"), initializer=isolate) as pool:
        running = [pool.submit(run_job, kind, case, asked.sample, asked.seed) for kind, case in jobs()]
        for job in as_completed(running):
            for tally in job.result():
                tallies.append(tally)
                sys.stdout.write("\n  ".join([str(tally), *tally.wrong]) + "\n")
                sys.stdout.flush()
    wrong = sum(len(tally.wrong) for tally in tallies)
    faults = sum(tally.faults for tally in tallies)
    record("allocations", "one allocation fails", faults, wrong)
    sys.stdout.write(f"{faults} faults tried, seed {asked.seed}: {wrong} wrong\n")
    return 1 if wrong else 0


def isolate() -> None:
    """Keep a process out of the user's folders and off the network, and its libraries quiet."""
    folder = tempfile.mkdtemp(prefix="tunedeck-torture-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.update({name: str(Path(folder, name.lower())) for name in FOLDERS} | {"HF_HUB_OFFLINE": "1"})
    warnings.simplefilter("ignore")
    disable_progress_bars()


if __name__ == "__main__":
    sys.exit(main())
