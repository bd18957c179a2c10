"""Allocations that fail on ranks: where each one is asked for, which ones to refuse, and what must hold afterwards.

Not a test module. A place is what the engine does when it asks for memory: it gathers weights, copies them out, sends
gradients, clips ... The sweep refuses allocations at every place, on each rank alone, on all at once, and twice in a
row: again soon after the first, while the ranks recover or in the next attempt.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from engine.device.metered import MeteredDevice

if TYPE_CHECKING:
    from tests.distributed.rank_workbench import RankWorkbench

PLACES = {
    "foreach_all_gather": "gather",
    "foreach_all_gather_copy_out": "copy-out",
    "foreach_reduce": "reduce",
    "StepComputation.meet": "reduce",
    "SequenceGroup.exchange": "exchange",
    "StepComputation._clip": "clip",
    "StepGuard.prepare": "optimizer",
    "StepComputation.apply": "optimizer",
    "_checkpoint_hook.__init__.<locals>.unpack_hook": "recomputation",
    "Tensor.backward": "backward",
    "StepComputation.accumulate": "forward",
}
"""Function on the stack = place; the innermost one counts."""

ELSEWHERE = "between steps"


def place_of(frame: FrameType | None) -> str:
    """The activity of the engine in `frame`, by name."""
    while frame is not None:
        place = PLACES.get(frame.f_code.co_qualname)
        if place is not None:
            return place
        frame = frame.f_back
    return ELSEWHERE


class Witness(MeteredDevice):
    """A metered device that records the place of each allocation, and which allocations were refused."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.asked: list[str] = []
        self.refused: list[str] = []
        tracker = self._meter.tracker
        charge = tracker._charge

        def noting(size_bytes: int, operation: Any) -> None:
            self.asked.append(place_of(sys._getframe(1)))
            try:
                charge(size_bytes, operation)
            except torch.OutOfMemoryError:
                self.refused.append(self.asked[-1])
                raise

        tracker._charge = noting  # type: ignore[method-assign]  # only here is every allocation seen


@dataclass(frozen=True)
class Fault:
    """The allocations of a device to refuse: the `allocation`-th, and then for each number in `then` the allocation
    that comes so many after the last refused one. With `on_host`, the `allocation`-th host allocation is refused
    instead."""

    allocation: int
    then: tuple[int, ...] = ()
    on_host: bool = False

    def spring(self, device: MeteredDevice) -> None:
        """Make `device` refuse these allocations."""
        if self.on_host:
            device.fail_host_at(self.allocation)
        else:
            device.fail_at(self.allocation, *self.then)


Faults = dict[int, Fault]
"""By rank."""


@dataclass(frozen=True)
class Asked:
    """The allocations of one rank in steps without faults: the numbers of device allocations by place, and the number
    of host allocations."""

    device: dict[str, list[int]]
    host: int


def asked_by(work: RankWorkbench) -> Asked:
    """Take steps without faults; returns the allocations that they request. All ranks call it."""
    work.reset()
    first, first_on_host = len(work.device.asked), work.device.host_allocations
    work.steps()
    places: dict[str, list[int]] = {}
    until, until_on_host = work.asked
    for number, place in enumerate(work.device.asked[first:until], 1):
        places.setdefault(place, []).append(number)
    places.pop(ELSEWHERE, None)
    return Asked(places, until_on_host - first_on_host)


def sample_of_faults(asked: Sequence[Asked], count: int, seed: int) -> list[Faults]:
    """`count` random faults, in turn on each rank alone and on all ranks at once."""
    drawn = random.Random(seed)
    every = list(range(len(asked)))
    who = [[rank] for rank in every] + [every]
    anywhere = [[number for numbers in rank.device.values() for number in numbers] for rank in asked]
    return [{rank: Fault(drawn.choice(anywhere[rank])) for rank in who[number % len(who)]} for number in range(count)]


def sweep_of_faults(asked: Sequence[Asked], seed: str) -> Iterator[Faults]:
    """Faults at every place where memory is requested: on each rank alone, on all at once, and on one of them again
    soon after; then host allocations."""
    drawn = random.Random(seed)
    every = range(len(asked))
    for place in sorted({place for rank in asked for place in rank.device}):
        there = [rank for rank in every if place in asked[rank].device]
        at = {rank: Fault(drawn.choice(asked[rank].device[place])) for rank in there}
        yield from ({rank: fault} for rank, fault in at.items())
        if len(there) > 1:
            yield at
        twice = drawn.choice(there)
        yield {twice: Fault(drawn.choice(asked[twice].device[place]), then=(drawn.randint(1, 6),))}
    for rank in every:
        if asked[rank].host:
            yield {rank: Fault(drawn.randint(1, asked[rank].host), on_host=True)}


def faulty_steps(work: RankWorkbench, faults: Faults) -> dict[str, Any]:
    """Take the first steps with `faults`. Returns their results, the places where allocations were refused on this
    rank, the reported failures, and the bytes left over. All ranks call it."""
    work.reset()
    work.ranks.all_gather_object("reset")
    held, refused = work.device.memory().allocated_bytes, len(work.device.refused)
    on_host = any(fault.on_host for fault in faults.values())
    fault = faults.get(work.ranks.rank)
    if fault is not None:
        fault.spring(work.device)
    result = work.steps()
    return result | {
        "refused": work.device.refused[refused:] + (["host"] if fault is not None and on_host else []),
        "told": [(each.oom.rank, each.oom.failure.phase, each.remedy) for each in work.told],
        "left_bytes": work.device.memory().allocated_bytes - held,
    }


Tried = list[tuple[Faults, dict[str, Any]]]
"""Faults, and what the steps came to on one rank."""


def sampled(work: RankWorkbench, count: int, seed: int) -> Tried:
    """Take steps under each of `count` random faults. All ranks call it."""
    asked = [Asked(**each) for each in work.ranks.all_gather_object(asdict(asked_by(work)))]
    return [(faults, faulty_steps(work, faults)) for faults in sample_of_faults(asked, count, seed)]


def wrong_among(by_rank: Sequence[Tried], expected: dict[str, Any]) -> list[tuple[Faults, list[str]]]:
    """The faults after which something was wrong, each with the complaints."""
    found = []
    for everywhere in zip(*by_rank, strict=True):
        results = [result for _, result in everywhere]
        words = complaints(results, [differences(result, expected) for result in results])
        found += [(everywhere[0][0], words)] if words else []
    return found


def differences(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Names of the results that differ between two runs of the steps by more than 1e-5; gradients are also compared as
    a whole, relative to their norm."""
    found = [name for name in ("losses", "norms") if here[name] != pytest.approx(there[name], rel=1e-5)]
    found += [name for name in ("samples", "choices") if here[name] != there[name]]
    for number, (one, other) in enumerate(zip(here["gradients"], there["gradients"], strict=True), 1):
        off = float((one - other).norm() / other.norm())
        if not (off < 1e-5 and close(one, other)):
            found.append(f"the gradient of step {number} by {off:.1e} of its norm")
    if not close(here["weights"], there["weights"]):
        found.append("weights")
    return found


def close(here: Tensor, there: Tensor) -> bool:
    """Whether the tensors are equal, value by value, up to the rounding of fp32."""
    return torch.allclose(here, there, rtol=1e-5, atol=1e-6)


def complaints(results: Sequence[dict[str, Any]], differing: Sequence[list[str]]) -> list[str]:
    """What is wrong with steps that survived faults, from the results of all ranks; empty if nothing is."""
    found = [f"rank {rank}: {', '.join(words)} differ" for rank, words in enumerate(differing) if words]
    found += [
        f"rank {rank}: {result['left_bytes']} bytes left over"
        for rank, result in enumerate(results)
        if result["left_bytes"]
    ]
    struck = {rank: len(result["refused"]) for rank, result in enumerate(results) if result["refused"]}
    told = Counter(rank for rank, _, _ in results[0]["told"])
    if told != struck:
        found.append(f"refused by rank {struck}, told by rank {dict(told)}")
    return found
