"""What is known of one allocation failure, and how it is caught without keeping anything of it alive.

An exception's traceback holds every frame between the raise and the handler, and with them the tensors of the failed
attempt; so a failure is turned into plain values inside the handler and everything else happens after it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from engine.device.base import Device
from engine.device.oom import classify


@dataclass(frozen=True)
class Failure:
    """An allocation that failed: where, what was asked, what was held at that moment (bytes)."""

    kind: str
    """device, host or pinned."""
    phase: str
    requested_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    text: str


def attempt(action: Callable[[], None], device: Device, phase: Callable[[], str]) -> Failure | None:
    """Run `action`; None when it went through, a Failure when memory ran out. Every other exception passes through."""
    try:
        action()
    except (RuntimeError, MemoryError) as error:
        found = classify(error)
        if found is None:
            raise
        memory = device.memory()
        failure = Failure(
            found.kind, phase(), found.requested_bytes, memory.allocated_bytes, memory.reserved_bytes, found.text
        )
        traceback.clear_frames(error.__traceback__)
        return failure
    return None
