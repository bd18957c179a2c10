"""Collects what a run has been asked to do: by control files, by signals, and by --max-hours. The training loop looks
at the requests between steps.

SIGTERM and SIGINT ask to stop; a second one ends the process at once. SIGHUP is ignored: a terminal that goes away is
no reason to stop training.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from engine.errors import KILLED_CODE
from engine.journal.control import ControlInbox
from engine.journal.events import EventWriter


class RunRequests:
    """Collects what a run was asked to do. The attribute `ending` is "stop" or "pause" once the run should end, else
    None."""

    def __init__(self, inbox: ControlInbox | None, writer: EventWriter | None, max_hours: float | None) -> None:
        """`max_hours` counts from now; None means no limit. On rank 0, `inbox` has the control files and `writer`
        records the answers in the journal. Both are None on other ranks, which get their requests through `adopt`."""
        self._inbox, self._writer = inbox, writer
        self._deadline = time.monotonic() + max_hours * 3600 if max_hours else None
        self._signals = 0
        self.ending: str | None = None
        """How the run should end, "stop" or "pause"; None while it should go on."""
        self.reason = ""
        self.checkpoint = False
        """A checkpoint was asked for; the loop clears it."""

    def poll(self) -> bool:
        """Read new requests and record in the journal whether each is accepted; returns True if the run should end.
        Lists one folder, which is fast enough to do at every step."""
        for request in self._inbox.poll() if self._inbox else ():
            accepted = self.ending is None
            if accepted and request.name == "checkpoint":
                self.checkpoint = True
            elif accepted:
                self._end(request.name, "asked for")
            reason = "after this step" if accepted else f"already ending ({self.ending})"
            if self._writer is not None:
                self._writer.write("control", request=request.name, accepted=accepted, reason=reason)
        if self._signals and self.ending is None:
            self._end("stop", "signal")
        if self._deadline is not None and time.monotonic() > self._deadline and self.ending is None:
            self._end("stop", "max_hours reached")
        return self.ending is not None

    def as_json(self) -> dict[str, Any]:
        """Return the present requests as a JSON-compatible dict, which rank 0 broadcasts to the other ranks (`adopt`).
        """
        return {"ending": self.ending, "reason": self.reason, "checkpoint": self.checkpoint}

    def adopt(self, requests: dict[str, Any]) -> bool:
        """Replace this rank's requests by those of rank 0, made by `as_json`; returns True if the run should end."""
        self.ending, self.reason, self.checkpoint = requests["ending"], requests["reason"], requests["checkpoint"]
        return self.ending is not None

    def _end(self, how: str, reason: str) -> None:
        self.ending, self.reason = how, reason

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """While the block runs, SIGTERM and SIGINT request a stop. Main thread only."""
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(KILLED_CODE)
