"""The keys of the Launch screen that make something of the choice other than a run: samples of its data, the command,
saved files; and the reading of small data for the plan.

Try: `d` on the Launch screen
"""

from __future__ import annotations

import shlex

from engine.config.files.find import SpecKind
from engine.config.files.text import visible
from engine.errors import TunedeckError
from tui.launch.choice import Choice, data_arguments
from tui.launch.samples import read_samples
from tui.launch.tabs import SAMPLES, TabContents
from tui.screens.picker_keys import PickerKeys
from tui.widgets.input_prompt import InputPrompt

READING = "reading the data: a process with the tokenizer is starting ..."


class DataKeys(PickerKeys):
    """Base class of a screen with these keys."""

    tab_contents: TabContents

    def action_open_tab(self, tab: str) -> None:
        """Open a tab by its name, and show its lines."""
        raise NotImplementedError

    def show_budget(self) -> None:
        """Show verdict, memory bar and status line."""
        raise NotImplementedError

    def do_copy(self) -> None:
        """Copy the command that starts the same run without the console to the terminal's clipboard."""
        self.app.copy_to_clipboard(shlex.join(self.tab_contents.command()))
        self.show_message("the command was sent to the terminal's clipboard")

    def do_samples(self) -> None:
        """Open the samples tab, and read samples of the data for it in a separate process."""
        self.tab_contents.samples_status = READING
        self.action_open_tab(SAMPLES)
        self.run_worker(self._read_samples(self.state.choice), group="samples", exclusive=True)

    async def _read_samples(self, choice: Choice) -> None:
        await self.tab_contents.read_samples(choice)
        self._data_were_read()

    def do_save(self) -> None:
        """Ask for a name, and save the changed recipe or profile as a new file; if both are changed, the recipe
        first."""
        kind = self.state.changed_kinds[0]
        ask = self.query_one(InputPrompt).ask
        ask(
            f"save as a new {kind}, named",
            self.state.unused_name(kind),
            lambda name: self._save(kind, name),
            enter="save",
        )

    def _save(self, kind: SpecKind, name: str) -> None:
        try:
            path = self.state.save(kind, name)
        except TunedeckError as error:
            self.show_error(error)
            return
        self.show_choice()
        self.show_message(f"saved {visible(str(path))}")
        if self.state.changed_kinds:
            self.do_save()

    def read_lengths(self) -> None:
        """Read small data unasked, in a process of its own, so that the plan is for the sequences that there are."""
        choice = self.state.unread_data() if self.is_active and not self.view.fields.is_edited else None
        if choice is not None:
            self.show_budget()
            self.run_worker(self._lengths_of(choice), group="lengths")

    async def _lengths_of(self, choice: Choice) -> None:
        failed = False
        try:
            await read_samples(data_arguments(choice), 0)
        except TunedeckError:
            failed = True  # a start would refuse the data with the reason; the samples tab shows it, too
        self._data_were_read(failed=failed)

    def _data_were_read(self, *, failed: bool = False) -> None:
        changed = self.state.data_were_read(failed=failed)
        self.show_choice()
        if changed:
            self.show_message(changed)
