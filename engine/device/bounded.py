"""Bounds a call that waits in a library without a time limit of its own, such as CUDA's or NCCL's.

Try: `pytest tests/distributed/test_streams.py`
"""

from __future__ import annotations

import threading
from collections.abc import Callable


def within(seconds: float | None, action: Callable[[], object], too_late: Callable[[], Exception]) -> None:
    """Call `action` and wait for its end, at most `seconds` (None: without a limit). Raises what `action` raises; if it
    has not returned in time, raises the exception that `too_late()` returns, and `action` continues in its thread until
    the process ends."""
    if seconds is None:
        action()
        return
    errors: list[Exception] = []

    def call() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  (of any kind: it is raised again in the thread that waits)
            errors.append(error)

    thread = threading.Thread(target=call, name="bounded call", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise too_late()
    if errors:
        raise errors[0]
