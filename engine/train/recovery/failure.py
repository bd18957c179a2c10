"""What is known of one allocation failure, and how it is caught without keeping anything of it alive.

An exception's traceback holds every frame between the raise and the handler, and with them the tensors of the failed
attempt; so a failure is turned into plain values inside the handler and everything else happens after it.

`retried` is for whole actions that are simply done again (loading, writing a checkpoint); how an optimizer step is
redone is `engine.train.step.transaction`'s affair.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from engine.device.base import Device
from engine.device.oom import classify, flush_autograd, forget_frames
from engine.errors import MemoryExhaustedError
from engine.train.monitor.memory_breakdown import Holdings

T = TypeVar("T")

ATTEMPTS = 3
"""How often an action is tried that nothing can be made smaller in: a passing shortage may strike twice."""


@dataclass(frozen=True)
class Failure:
    """An allocation that failed: where, what was asked, what was held at that moment (bytes)."""

    kind: str
    """device, host or pinned. On the plain CPU host memory is the device's."""
    phase: str
    requested_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    text: str
    held: Holdings | None = None
    """Who held it; None where nobody looked."""


def attempt(
    action: Callable[[], None], device: Device, phase: Callable[[], str], stock: Callable[[], Holdings] | None = None
) -> Failure | None:
    """Run `action`; None when it went through, a Failure when memory ran out. Every other exception passes through.

    `stock` is asked who holds the memory while it is still held.
    """
    try:
        action()
    except (RuntimeError, MemoryError, OSError) as error:
        found = classify(error)
        if found is None:
            raise
        memory = device.memory()
        kind = "device" if device.kind == "cpu" else found.kind
        failure = Failure(
            kind, phase(), found.requested_bytes, memory.allocated_bytes, memory.reserved_bytes, found.text,
            stock() if stock else None,
        )  # fmt: skip
        forget_frames(error)
        return failure
    return None


def retried(
    action: Callable[[], T], phase: str, device: Device, report: Callable[[Failure, str, int], None]
) -> T:
    """The result of `action`, begun anew after each failure, ATTEMPTS times in all.

    `report` gets each failure, what was done about it, and the number of the attempt.

    Raises:
        MemoryExhaustedError: memory ran out each time.
    """
    results: list[T] = []
    for number in range(1, ATTEMPTS + 1):
        failure = attempt(lambda: results.append(action()), device, lambda: phase)
        if failure is None:
            return results[0]
        flush_autograd()
        device.release_cached()
        report(failure, "retry" if number < ATTEMPTS else "give_up", number)
    raise MemoryExhaustedError(
        f"{'out of memory' if failure.kind == 'device' else 'host memory ran out'} in {phase}: {failure.text}",
        fix="close other programs that hold memory, or use a profile with more of it",
    )


@contextmanager
def quick_to_collect() -> Iterator[None]:
    """While the block runs, the collector passes over everything that is there already. What it passed over before,
    because it was imported (`engine.commands.importing`), stays so.

    A recovery collects garbage to be sure of what is held. With torch and transformers imported and a model built, a
    collection looks at 430,000 objects and takes 250 to 450 ms, longer than many a micro-batch; of a step alone, 1 ms.
    """
    frozen_before = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()
