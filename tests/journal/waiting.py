"""Waiting for what another process does: bounded, and as short as it can be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE_SECONDS = 120.0
"""A process that has not answered by then hangs, on the busiest machine."""


def until(condition: Callable[[], object]) -> None:
    """Return as soon as the condition holds; fail after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        pause.wait(0.01)
