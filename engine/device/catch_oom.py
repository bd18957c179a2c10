"""Catches allocation failures without keeping any tensor of the failed attempt alive.

An exception's traceback references every frame between the raise and the handler, and so the tensors of the failed
attempt. Therefore `catch_oom` only turns the exception into plain values in the handler; recovery starts after it.

`retry_on_oom` repeats whole actions (loading, writing a checkpoint). How an optimizer step is repeated is in
`engine.train.step.transaction`.

Try: `pytest tests/train/recovery/test_host_memory_limits.py`
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from engine.device.base import Device
from engine.device.oom import MemoryBreakdown, OutOfMemory, classify, clear_frames, flush_autograd
from engine.errors import MemoryExhaustedError

T = TypeVar("T")

STEADY_READINGS, STEADY_PAUSE_SECONDS, STEADY_LIMIT = 3, 0.002, 250
"""Memory is steady when it is the same for so many readings, so long apart; at most half a second is waited. Dropping
a queue is microseconds of work, but its thread may wait for the interpreter's lock."""

ATTEMPTS = 3
"""How many times an action is tried that cannot be made smaller. A temporary shortage of memory may make the action
fail twice in a row."""


def catch_oom(
    action: Callable[[], object], device: Device, phase: str, breakdown: Callable[[], MemoryBreakdown] | None = None
) -> OutOfMemory | None:
    """Run `action`. Returns the failure if memory ran out, with `phase` as what was being done, else None; every other
    exception is raised unchanged.

    `breakdown` is called before the memory of the failed attempt is freed; its result becomes `OutOfMemory.held`.
    """
    try:
        action()
    except (RuntimeError, MemoryError, OSError) as error:
        found = classify(error)
        if found is None:
            raise
        memory = device.memory()
        failure = replace(
            found,
            kind="device" if device.kind == "cpu" else found.kind,
            phase=phase,
            allocated_bytes=memory.allocated_bytes,
            reserved_bytes=memory.reserved_bytes,
            held=breakdown() if breakdown else None,
        )
        clear_frames(error)
        return failure
    return None


def free_failed_graph(device: Device) -> None:
    """Free the graph of a backward pass that ran out of memory. Call it outside the `except` block.

    On CUDA, autograd runs backward in a thread of its own. When an operation fails there, the caller gets the exception
    at once, while that thread still frees what it had queued, such as gradients of the failed graph. So this function
    returns only when the number of allocated bytes no longer changes, or after STEADY_LIMIT readings of it.
    """
    flush_autograd()
    if device.kind == "cuda":
        device.wait_until_idle()
        wait_until_steady(lambda: device.memory().allocated_bytes)


def wait_until_steady(
    read: Callable[[], int], pause: Callable[[float], None] = time.sleep, *, limit: int = STEADY_LIMIT
) -> bool:
    """Call `read` every few milliseconds until it has returned the same value STEADY_READINGS times in a row; returns
    False if it has not after `limit` readings."""
    last, same = read(), 1
    for _ in range(limit - 1):
        pause(STEADY_PAUSE_SECONDS)
        now = read()
        same = same + 1 if now == last else 1
        if same == STEADY_READINGS:
            return True
        last = now
    return False


def retry_on_oom(
    action: Callable[[], T], phase: str, device: Device, report: Callable[[OutOfMemory, str, int], None]
) -> T:
    """Run `action` and return its result; after an allocation failure run it again, up to ATTEMPTS times in all.
    `phase` is what `action` does, for messages.

    `report` is called with each failure, the remedy ("retry" or "give_up") and the number of the attempt.

    Raises:
        MemoryExhaustedError: memory ran out each time.
    """
    results: list[T] = []
    for number in range(1, ATTEMPTS + 1):
        failure = catch_oom(lambda: results.append(action()), device, phase)
        if failure is None:
            return results[0]
        free_failed_graph(device)
        device.release_cached()
        report(failure, "retry" if number < ATTEMPTS else "give_up", number)
    assert failure is not None
    raise MemoryExhaustedError(
        f"{'out of memory' if failure.kind == 'device' else 'host memory ran out'} in {phase}: {failure.text}",
        fix="close other programs that hold memory, or use a profile with more of it",
    )


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Inside the block, garbage collection skips every object that existed before the block. After the block, nothing
    is unfrozen if objects had been frozen earlier (by `engine.commands.importing`, after the imports).

    A recovery from an out-of-memory error collects garbage, so that only memory in use is counted. With torch and
    transformers imported and a model built, a collection visits 430,000 objects and takes 250 to 450 ms, longer than
    many micro-batches. Limited to the objects of one step, a collection takes 1 ms.
    """
    frozen_before = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()
