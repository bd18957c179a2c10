"""Waiting for what another process does: bounded, and as short as it can be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def until(condition: Callable[[], object], *, seconds: float = 20.0) -> None:
    """Return as soon as the condition holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        pause.wait(0.01)
