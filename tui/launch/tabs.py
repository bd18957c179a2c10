"""The contents of the Launch screen's tabs: suggested fixes, samples of the data, the headless command, and what
differs from the last run of the recipe.

`TabContents` makes the lines of each tab for a width. The screen decides when samples are read and when advice is
computed.

Try: `tunedeck -p demo -r demo`, then `]`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from textual.content import Content

from engine.config.files.text import visible
from engine.errors import TunedeckError
from tui.launch.choice import Choice, data_arguments, shell_lines, train_command
from tui.launch.difference import difference_lines
from tui.launch.fields import format_value
from tui.launch.fixes import FixLine, fix_lines, fix_notes
from tui.launch.samples import read_samples, sample_lines
from tui.launch.state import LaunchState

if TYPE_CHECKING:
    from engine.budget.advise.search import Suggestion

FIXES, SAMPLES, COMMAND, DIFFERENCE = TABS = ("fixes", "samples", "command", "difference")


class TabContents:
    """Makes the lines that the tabs show for the present choice."""

    def __init__(self, state: LaunchState, *, runs: str, ascii_only: bool, letters: bool) -> None:
        """`runs` is the console's --runs flag, which becomes part of the headless command. `letters` says that the
        terminal shows no colours."""
        self._state, self._runs, self._ascii_only, self._letters = state, runs, ascii_only, letters
        self._fixes: list[FixLine] = []
        self._report: tuple[Choice, Mapping[str, Any]] | None = None
        self.samples_status = ""
        """What the samples tab says instead of samples; empty where it shows them."""

    def lines(self, tab: str, width: int) -> list[Content]:
        """Return the lines of the tab `tab` (one of TABS) for the present choice, made for `width` cells."""
        made = {FIXES: self._fix_lines, SAMPLES: self._sample_lines, COMMAND: self._command_lines,
                DIFFERENCE: self._difference_lines}  # fmt: skip
        return made[tab](width)

    def _fix_lines(self, width: int) -> list[Content]:
        """The advice as lines. Until the advice is computed, the lines for the previous choice are shown, to avoid
        flicker."""
        advice = self._state.advice()
        if self._state.evaluated.plan is None:
            self._fixes = []
            return Content.styled("no advice without a plan: the settings have errors", "$muted").wrap(width)
        if advice is not None:
            self._fixes = fix_lines(advice, width)
        return [line.content for line in self._fixes]

    def _sample_lines(self, width: int) -> list[Content]:
        if self.samples_status or self._report is None:
            text = self.samples_status or "enter shows samples as the model sees them"
            return Content.styled(text, "$muted").wrap(width)
        choice, report = self._report
        outdated = Content.styled("from before the last change; enter updates them", "$caution").wrap(width)
        lines = sample_lines(report, width, ascii_only=self._ascii_only, letters=self._letters)
        return lines if choice == self._state.choice else [*outdated, *lines]

    def _command_lines(self, width: int) -> list[Content]:
        lines = [part for line in shell_lines(self.command()) for part in Content(visible(line)).wrap(width)]
        note = Content.styled("s starts the same run. y copies the command.", "$muted").wrap(width)
        return [*lines, Content(""), *note]

    def _difference_lines(self, width: int) -> list[Content]:
        return difference_lines(self._state.evaluated.spec, self._state.runs_dir, width)

    def command(self) -> list[str]:
        """The command line that starts the run without the console."""
        return train_command(self._state.choice, runs=self._runs)

    def suggestion(self, line: int | None, width: int) -> Suggestion | None:
        """Return the suggestion described on line `line` of the fixes tab; the first suggestion if `line` is None or a
        heading; None if there are none. Computes the advice if necessary."""
        advice = self._state.advice(compute=True)
        self._fixes = fix_lines(advice, width) if advice is not None else []
        on_line = self._fixes[line : line + 1] if line is not None else []
        return next((fix.suggestion for fix in [*on_line, *self._fixes] if fix.suggestion is not None), None)

    def fix(self, line: int | None, width: int) -> str:
        """Say which fix the key `a` applies (see `suggestion`), such as "a applies fix 1: data.packing = true"; empty
        while the advice is not computed, and if there is no fix."""
        advice = self._state.advice()
        suggestion = self.suggestion(line, width) if advice is not None else None
        if advice is None or suggestion is None:
            return ""
        number = 1 + [*advice.suggestions, *advice.room].index(suggestion)
        changes = [f"{key} = {format_value(after)}" for key, (_, after) in suggestion.changes.items()]
        return visible(f"a applies fix {number}: {', '.join(changes)}")

    def notes(self, line: int | None, width: int) -> str:
        """All that the fix on line `line` changes, and why it helps; empty if there is no fix on it."""
        suggestion = self.suggestion(line, width) if self._state.advice() is not None else None
        return fix_notes(suggestion) if suggestion is not None and line is not None else ""

    async def read_samples(self, choice: Choice) -> None:
        """Read the samples of a choice's data in a separate process, for the samples tab. An error is shown in the tab
        instead."""
        try:
            self._report = (choice, await read_samples(data_arguments(choice)))
            self.samples_status = ""
        except TunedeckError as error:
            self.samples_status = visible(error.found, keep="\n")
