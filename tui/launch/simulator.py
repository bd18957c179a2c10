"""Makes the simulations that a plan or its fixes need in a thread, so that the Launch screen answers keys meanwhile.

Try: `python -m pytest tests/tui/launch/test_simulated.py`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Thread

from textual.app import App

from engine.errors import TunedeckError


class Simulator:
    """Makes one simulation at a time and reports its end to the screen."""

    def __init__(self, app: App[object], ended: Callable[[str], None]) -> None:
        """`ended` is called in the thread of `app` after each simulation, with the reason why it failed; the reason is
        empty if it did not fail."""
        self._app, self._ended = app, ended
        self._busy = False

    def start(self, compute: Callable[[], object] | None) -> None:
        """Call `compute` with simulations allowed, in a thread of its own. Does nothing if `compute` is None, or while
        another simulation is made."""
        if compute is None or self._busy:
            return
        self._busy = True
        # A daemon thread does not keep the console open.
        Thread(target=self._simulate, args=(compute,), daemon=True).start()

    def _simulate(self, compute: Callable[[], object]) -> None:
        from engine.launch.other_processes import with_simulations  # slow to import: not before the first paint

        problem = ""
        try:
            with_simulations(compute)
        except TunedeckError as error:
            problem = error.found
        with suppress(RuntimeError):  # the console was left meanwhile
            self._app.call_from_thread(self._end, problem)

    def _end(self, problem: str) -> None:
        self._busy = False
        self._ended(problem)
