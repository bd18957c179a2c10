"""What the Launch screen shows, without what it does: two lists, the fields, the tabs, and the budget under them.

Given values, it draws them; it knows which pane is in front, which is the only one shown where there is room for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.content import Content
from textual.message import Message

from engine.spec.files.text import visible
from tui.files.catalog import Entry
from tui.launch import file_rows
from tui.launch.budget_lines import budget_lines, devices_of
from tui.launch.choice import Choice, Outcome
from tui.launch.field_list import Fields
from tui.launch.fields import Row, help_of
from tui.theme import draw
from tui.widgets.row_list import Rows
from tui.widgets.tab_panel import Panel
from tui.widgets.text_lines import Lines

PANES = PROFILES, RECIPES, FIELDS, PANEL = ("profiles", "recipes", "field-pane", "panel")


class LaunchView(Vertical):
    """Four panes and the budget."""

    class Refocused(Message):
        """Another pane is in front."""

    def __init__(self, tabs: Sequence[str], fields: Fields, *, ascii_only: bool) -> None:
        super().__init__(id="launch")
        self._tabs, self._ascii_only = tabs, ascii_only
        self.fields = fields
        """The rows of fields."""
        self._changed = 0
        self.pane = FIELDS
        """The pane in front."""

    def compose(self) -> ComposeResult:
        """The panes, then the budget."""
        with Container(id="panes"):
            with Vertical(id=PROFILES, classes="pane"):
                yield Lines(classes="heading")
                yield Rows(id="profile-rows")
            with Vertical(id=RECIPES, classes="pane"):
                yield Lines(classes="heading")
                yield Rows(id="recipe-rows")
            with Vertical(id=FIELDS, classes="pane -front"):
                yield Lines(classes="heading")
                yield self.fields
            yield Panel(self._tabs, id=PANEL, classes="pane")
        yield Lines(id="budget")

    @property
    def panel(self) -> Panel:
        """The tabs."""
        return self.query_one(Panel)

    def go(self, pane: str) -> None:
        """Bring a pane to the front and give it the keys."""
        self._bring(pane)
        self.screen.set_focus(self.query_one(f"#{pane} Rows", Rows))

    def step(self, by: int) -> None:
        """The pane so many after the one in front."""
        self.go(PANES[(PANES.index(self.pane) + by) % len(PANES)])

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """The pane with the focus is the one in front."""
        inside = {widget.id for widget in event.widget.ancestors_with_self}
        self._bring(next(pane for pane in PANES if pane in inside))

    def _bring(self, pane: str) -> None:
        if pane == self.pane:
            return
        self.pane = pane
        for other in self.query(".pane"):
            other.set_class(other.id == pane, "-front")
        self.post_message(self.Refocused())

    def show_lists(
        self, profiles: Sequence[Entry], recipes: Sequence[Entry], chosen: Choice, verdicts: Mapping[str, Outcome]
    ) -> None:
        """Both lists; `verdicts` has what is known of each recipe on the chosen profile."""
        names, ascii_only = file_rows.name_width(profiles), self._ascii_only
        self._head(PROFILES, "Profile", [entry.text == chosen.profile for entry in profiles])
        self.query_one("#profile-rows", Rows).show([
            file_rows.profile_row(entry, chosen=entry.text == chosen.profile, names=names, ascii_only=ascii_only)
            for entry in profiles
        ])  # fmt: skip
        names = file_rows.name_width(recipes)
        self._head(RECIPES, "Recipe", [entry.text == chosen.recipe for entry in recipes])
        self.query_one("#recipe-rows", Rows).show([
            file_rows.recipe_row(
                entry, verdicts.get(entry.text), chosen=entry.text == chosen.recipe, names=names, ascii_only=ascii_only
            )
            for entry in recipes
        ])  # fmt: skip

    def put_cursors(self, profile: int, recipe: int) -> None:
        """Move the cursors of both lists."""
        self.query_one("#profile-rows", Rows).move_to(profile)
        self.query_one("#recipe-rows", Rows).move_to(recipe)

    def show_fields(self, rows: Sequence[Row], outcome: Outcome) -> None:
        """The rows, with what is wrong with each."""
        self._changed = sum(row.changed for row in rows)
        troubles = {row.key: visible(outcome.trouble_of(row.key)) for row in rows}
        self.fields.put(rows, troubles, width=self.fields.size.width)
        self.show_hint(outcome)

    def show_hint(self, outcome: Outcome) -> None:
        """What is wrong with the field under the cursor, else what it means; its key is in the heading."""
        row = self.fields.row
        changed = f"  {self._changed} changed" if self._changed else ""
        self._head(FIELDS, "Fields" + changed, [], visible(row.key) if row is not None else "")
        if row is not None:
            trouble = visible(outcome.trouble_of(row.key))
            self.fields.hint(trouble or help_of(row.key), "$bad" if trouble else "$muted")

    def show_budget(self, outcome: Outcome, sound: Outcome) -> None:
        """Verdict, bars and legend; `sound` is shown, muted, while the outcome has no plan."""
        several = devices_of(sound) > 1
        if several != self.has_class("-several"):
            self.set_class(several, "-several")
            self.call_after_refresh(self.show_budget, outcome, sound)
        box, ascii_only = self.query_one("#budget", Lines), self._ascii_only
        width, height = box.size
        letters = ascii_only or self.app.no_color
        box.show(budget_lines(outcome, sound, width, height, letters=letters, ascii_only=ascii_only))

    def show_panel(self, lines: Sequence[Content]) -> None:
        """The open tab."""
        self.panel.show(lines, self._mark(PANEL))

    def _head(self, pane: str, text: str, chosen: Sequence[bool], beside: str = "") -> None:
        """A pane's heading; for a list also which of how many is chosen, `beside` at its right end."""
        count = f"  {chosen.index(True) + 1} of {len(chosen)}" if True in chosen else ""
        style = "bold" if pane == self.pane else "bold $muted"
        line = Content.assemble((self._mark(pane), "bold $info"), (text + count, style))
        heading = self.query_one(f"#{pane} > .heading", Lines)
        gap = heading.size.width - line.cell_length - len(beside) - 1
        heading.show([Content.assemble(line, " " * gap, (beside, "$muted")) if beside and gap > 0 else line])

    def _mark(self, pane: str) -> str:
        return draw("▶ ", ascii_only=self._ascii_only) if pane == self.pane else "  "
