"""The keys that open the lists of profiles and recipes on the Launch screen, and those that act while one is open.

Each move of the cursor in a list changes the choice, so that verdict and memory bar below it are those of the file
under the cursor. Enter keeps it, Esc returns to the choice before.

Try: `R` on the Launch screen
"""

from __future__ import annotations

from dataclasses import replace

from tui.keys import Key
from tui.launch.fields import PROFILE, RECIPE
from tui.launch.state import LaunchState
from tui.launch.view import LaunchView
from tui.screens.creation_keys import CreationKeys

WHILE_PICKING = [
    Key("launch", "enter", "enter", "choose", "choose this file"),
    Key("launch", "escape", "leave_picker", "back", "back to the previous file"),
]
"""The keys that end the choosing, shown first."""


class PickerKeys(CreationKeys):
    """Base class of a screen with these keys."""

    state: LaunchState

    @property
    def view(self) -> LaunchView:
        """The widget that fills the screen between title bar and footer."""
        return self.query_one(LaunchView)

    def show_choice(self) -> None:
        """Show the choice after it changed."""
        raise NotImplementedError

    def do_pick_profile(self) -> None:
        """Open the list of profiles, or close it."""
        self._toggle(PROFILE)

    def do_pick_recipe(self) -> None:
        """Open the list of recipes with their verdicts, or close it."""
        self._toggle(RECIPE)

    def _toggle(self, kind: str) -> None:
        picked = self.view.picked
        if picked:
            self.close_picker(keep=True)
        if picked != kind:
            self.state.begin_pick()
            entries = self.state.profiles if kind == PROFILE else self.state.recipes
            self.view.open_picker(kind, self.state.positions[kind == RECIPE], len(entries))
            self.call_after_refresh(self.show_choice)

    def close_picker(self, *, keep: bool) -> None:
        """Close the open list; `keep` the file under its cursor, or return to the choice before it was opened."""
        self.state.end_pick(keep=keep)
        self.view.close_picker()
        self.show_choice()
        self.call_after_refresh(self.show_choice)

    def do_leave_picker(self) -> None:
        """Close the open list and return to the choice before."""
        self.close_picker(keep=False)

    def pick(self, index: int) -> None:
        """Choose the file in row `index` of the open list."""
        state, kind = self.state, self.view.picked
        entries = state.profiles if kind == PROFILE else state.recipes
        if kind and index < len(entries):
            now, argument = state.choice, entries[index].argument
            choice = replace(now, profile=argument) if kind == PROFILE else replace(now, recipe=argument)
            if choice != state.choice:
                state.change(choice)
                self.show_choice()
