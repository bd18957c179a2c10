"""The actions of the keys that do something with one run, shared by the list of runs and the Run screen: tags and note,
its path, merging, sending its result to the hub.

Merging and sending are the commands `tunedeck merge` and `tunedeck push`, each in a process of its own that goes on
when the console is left; what it prints is in a log in the run's folder.

Try: `t` on the list of runs
"""

from __future__ import annotations

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.journal.labels import labels_from, labels_text, read_labels, write_labels
from tui.chat.choices import has_weights
from tui.screens.base import BaseScreen
from tui.widgets.input_prompt import InputPrompt

RUN_ACTIONS = ("label", "copy_path", "merge", "push")
"""Actions on one run."""

AFTER_TRAINING = ("done", "stopped", "paused", "failed", "oom", "stale")
"""States of a run on which no engine works."""


class RunKeys(BaseScreen):
    """Base class of a screen with these keys."""

    @property
    def acted_on(self) -> RunDirectory | None:
        """The run that the keys are about; None if there is none."""
        raise NotImplementedError

    def labels_changed(self) -> None:
        """Called after tags or note were written."""

    def run_action_refusal(self, action: str, status: str) -> str | None:
        """Why one of RUN_ACTIONS has no effect on a run with this status; None if it has one."""
        run = self.acted_on
        if action in ("label", "copy_path"):
            return None
        if status not in AFTER_TRAINING or run is None:
            return f"the run is {status or 'not read yet'}: no result yet"
        if action == "merge" and not run.adapter.is_dir():
            return "the run has no adapter to merge"
        if action == "push" and not has_weights(run):
            return "no result to push"
        return None

    def do_label(self) -> None:
        """Ask for tags and note of the run, and write them into its folder."""
        run = self.acted_on
        if run is not None:
            before = labels_text(read_labels(run))
            prompt = self.query_one(InputPrompt)
            prompt.ask("tags; note", before, lambda text: self._write_labels(run, text), allow_empty=True)

    def _write_labels(self, run: RunDirectory, text: str) -> None:
        try:
            write_labels(run, labels_from(text))
        except TunedeckError as error:
            self.show_error(error)
            return
        self.show_message(f"{clean(run.name)}: {clean(text) or 'no tags and no note'}")
        self.labels_changed()

    def do_copy_path(self) -> None:
        """Copy the path of the run's folder to the terminal's clipboard."""
        if self.acted_on is not None:
            self.app.copy_to_clipboard(str(self.acted_on.path))
            self.show_message(f"copied {clean(self.acted_on.path)}")

    def do_merge(self) -> None:
        """Merge the run's adapter into its base, in a process of its own."""
        if self.acted_on is not None:
            self.console.run_command(self.acted_on, "merge")

    def do_push(self) -> None:
        """Ask for a repository of the hub, and send the run's result there, in a process of its own."""
        run = self.acted_on
        if run is not None:
            question = "push to the hub as OWNER/NAME; new repositories are private"
            self.query_one(InputPrompt).ask(question, "", lambda repo: self._push(run, repo.strip()), enter="send")

    def _push(self, run: RunDirectory, repo: str) -> None:
        if repo:
            self.console.run_command(run, "push", "--yes", "--", repo)
