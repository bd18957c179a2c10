"""The keys that talk to the models of runs, and score them, each in a process of its own.

Try: `A` on a run that has a checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.launch.other_processes import Evaluation, start_evaluation
from tui.chat.choices import ChatTargets, has_weights
from tui.screens.base import BaseScreen

MODEL_ACTIONS = ("chat", "evaluate")


class ModelKeys(BaseScreen):
    """Base class of a screen with these keys."""

    def __init__(self) -> None:
        super().__init__()
        self._scorings: list[Evaluation] = []

    def tell_scorings(self) -> None:
        """Show how a scoring that was started here has ended. To be called when the screen reads."""
        for scoring in list(self._scorings):
            outcome = scoring.outcome()
            if outcome is not None:
                self._scorings.remove(scoring)
                self.show_message(outcome, "" if outcome.endswith("is scored") else "bold $bad")

    @property
    def chosen_runs(self) -> Sequence[RunDirectory]:
        """The runs on which these keys act."""
        raise NotImplementedError

    def no_model_reason(self) -> str | None:
        """Why the keys have no effect; None if they have one."""
        if not self.chosen_runs:
            return "no run under the cursor"
        without = next((run for run in self.chosen_runs if not has_weights(run)), None)
        return f"{without.name} has no checkpoint yet" if without is not None else None

    def do_chat(self) -> None:
        """Open the Chat screen with these runs, side by side."""
        runs_dir = self.console.runs_dir
        names = [run.name if run.path.parent == runs_dir else str(run.path) for run in self.chosen_runs]
        self.console.open_screen("chat", ChatTargets(tuple(names)))

    def do_evaluate(self) -> None:
        """Score the newest checkpoint of each run in a process that goes on without the console."""
        for run in self.chosen_runs:
            try:
                self._scorings.append(start_evaluation(run))
            except (TunedeckError, OSError) as error:
                self.show_message(error.found if isinstance(error, TunedeckError) else str(error), "bold $bad")
                return
        self.show_message("scoring in the background; log: evaluations/eval.log of the run")
