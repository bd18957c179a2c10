"""Bounds a call that waits in a library without a time limit of its own, such as CUDA's or NCCL's.

Try: `pytest tests/distributed/test_streams.py`
"""

from __future__ import annotations

import threading
from collections.abc import Callable


def within(seconds: float | None, action: Callable[[], object], too_late: Callable[[], Exception]) -> None:
    """Call `action`, in a thread of its own if there is a limit. Raises what `action` raises, and `too_late()` if it
    has not returned after `seconds`; its thread then ends with the process."""
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
