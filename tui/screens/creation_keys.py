"""The actions of the keys that make a run of a choice: start it, start it although it does not fit, queue it.

Each creates the run in a thread, as a worker of the screen, so that slow disks and the hub do not block the screen.

Try: `s` on the Launch screen
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Coroutine

from engine.config.files.text import visible
from engine.errors import TunedeckError
from tui.launch.choice import Choice
from tui.screens.base import CREATION, BaseScreen


class CreationKeys(BaseScreen):
    """Base class of a screen with these keys."""

    @property
    def choice(self) -> Choice:
        """The present choice, of which the keys make runs."""
        raise NotImplementedError

    def do_start(self) -> None:
        """Create the run of the present choice and start its engine, then open the Run screen."""
        self._start(force=False)

    def do_force(self) -> None:
        """Create and start the run of the present choice although its plan says that it does not fit."""
        self._start(force=True)

    def _start(self, *, force: bool) -> None:
        self._create(self._make_and_start(self.choice, force=force))

    def do_queue(self) -> None:
        """Create the run of the present choice and put it at the end of the queue."""
        self._create(self._make_and_enqueue(self.choice))

    def _create(self, creation: Coroutine[None, None, bool]) -> None:
        """Run the coroutine `creation`, which creates a run in a thread, as a worker of the screen, so that slow disks
        and the hub do not block the screen."""
        self.show_message("creating the run ...")
        self.run_worker(creation, group=CREATION)

    async def _make_and_start(self, choice: Choice, *, force: bool) -> bool:
        """Create the run of a choice and start its engine; returns whether it started. With `force`, also a run that
        does not fit."""
        from tui.launch.make_run import make_run  # slow to import: not before the first paint

        try:
            directory, notices = await to_thread(make_run, choice, self.console.runs_dir, force=force)
        except TunedeckError as error:
            self._show_failure(error)
            return False
        started = self.console.start_engine(directory, resume=False)
        if started and self.is_active:
            self.console.open_screen("run", directory)
        if started and notices:
            self.console.show_message("; ".join(map(visible, notices)), "$caution")
        return started

    async def _make_and_enqueue(self, choice: Choice) -> bool:
        """Create the run of a choice and put it into the queue; returns whether it is there."""
        from tui.launch.make_run import enqueue_run  # slow to import: not before the first paint

        try:
            name, place = await to_thread(enqueue_run, choice, self.console.runs_dir)
        except TunedeckError as error:
            self._show_failure(error)
            return False
        self.console.show_message(f"{name} is number {place} in the queue; 4 opens the queue")
        return True

    def _show_failure(self, error: TunedeckError) -> None:
        """Show why a run could not be created, on the screen that is in front now."""
        front = self.app.screen
        (front if isinstance(front, BaseScreen) else self).show_error(error)
