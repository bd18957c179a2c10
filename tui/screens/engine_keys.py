"""The actions of the keys that ask the engine of a run for something: a checkpoint, a pause, a stop, going on.

A request is a file in the run directory; the engine answers with an event, which the screen shows when it reads it.

Try: `w` on a run that is running
"""

from __future__ import annotations

from engine.errors import TunedeckError
from engine.journal import control
from engine.journal.directory import RunDirectory
from engine.launch.process import force_stop
from tui.screens.base import BaseScreen
from tui.screens.confirm import ConfirmScreen


class EngineKeys(BaseScreen):
    """Base class of a screen with these keys."""

    @property
    def directory(self) -> RunDirectory:
        """The directory of the run, to which requests are sent."""
        raise NotImplementedError

    @property
    def status(self) -> str:
        """The run's status, as it was read last."""
        raise NotImplementedError

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested and the engine has not ended yet."""
        raise NotImplementedError

    def refresh_now(self) -> None:
        """Read the run and paint what has changed, at once."""
        raise NotImplementedError

    def do_checkpoint(self) -> None:
        """Ask the engine to write a checkpoint after the present step and go on training."""
        self._ask_engine("checkpoint", "checkpoint requested after this step")

    def do_pause(self) -> None:
        """Ask the engine to write a checkpoint and end, so that the device is free."""
        self._ask_engine("pause", "pause requested: writes a checkpoint, then frees the device")

    def do_stop(self) -> None:
        """Ask for a confirmation, then request a stop; if a stop was requested before, kill the engine instead."""
        if self.is_stopping:
            self.show_message("killing the engine")
            self.run_worker(self._force, thread=True, exit_on_error=False)
            return
        question = "Stop this run after the current step, with a checkpoint?"
        self.app.push_screen(ConfirmScreen(question, "stop it"), self._stop_if)

    def _stop_if(self, yes: bool | None) -> None:
        if yes:
            self._ask_engine("stop", "stop requested after this step; x again stops now, without a checkpoint")

    def _ask_engine(self, name: str, message: str) -> None:
        """Write the request `name` into the run directory, and show `message`."""
        try:
            control.send_request(self.directory, name)
        except OSError as error:
            self.show_message(f"the request cannot be written: {error.strerror or error}", "bold $bad")
        else:
            asked_in = self.status
            self.show_message(message, holds=lambda: self.status == asked_in)
        self.refresh_now()

    def _force(self) -> None:
        """Kill the engine and record the end; an error is shown in the footer. Called in a thread, because a GPU driver
        may delay the end of a killed process for seconds."""
        try:
            force_stop(self.directory)
        except (TunedeckError, OSError) as error:
            found = error.found if isinstance(error, TunedeckError) else str(error)
            self.app.call_from_thread(self.show_message, found, "bold $bad")

    def do_resume(self) -> None:
        """Start an engine process that resumes the run."""
        self.console.start_engine(self.directory, resume=True)
        self.refresh_now()
