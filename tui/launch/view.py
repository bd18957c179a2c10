"""The layout of the Launch screen: two lists of files, the fields, the tabs, and the budget under them.

`LaunchView` draws a `LaunchSnapshot` and keeps track of the pane in front, the only one shown on a small terminal. What
the keys do is in `tui.screens.launch`.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.content import Content
from textual.message import Message

from engine.config.files.text import visible
from tui.launch import file_rows
from tui.launch.budget_bar import budget_lines
from tui.launch.evaluate import EvaluatedChoice
from tui.launch.field_list import FieldList
from tui.launch.fields import field_help
from tui.launch.state import LaunchSnapshot
from tui.theme import glyphs
from tui.widgets.memory_bar import Look
from tui.widgets.row_list import RowList
from tui.widgets.tab_panel import TabPanel
from tui.widgets.text_lines import TextLines

PANES = PROFILES, RECIPES, FIELDS, PANEL = ("profiles", "recipes", "field-pane", "panel")


class LaunchView(Vertical):
    """The widget that fills the Launch screen: the panes of profiles, recipes, fields and fixes, and the budget
    below."""

    class Refocused(Message):
        """Message: another pane came to the front."""

    def __init__(self, tabs: Sequence[str], fields: FieldList, front: str, *, ascii_only: bool) -> None:
        """`tabs` are the names of the tabs, `fields` is the list of fields, and `front` the pane that is in front at
        first."""
        super().__init__(id="launch")
        self._tabs, self._ascii_only = tabs, ascii_only
        self.fields = fields
        self._changed_fields = 0
        self.pane = front
        """The pane in front."""

    def compose(self) -> ComposeResult:
        """Yield the panes, then the budget."""
        with Container(id="panes"):
            with Vertical(id=PROFILES, classes=self._classes_of(PROFILES)):
                yield TextLines(classes="heading")
                yield RowList(id="profile-rows")
            with Vertical(id=RECIPES, classes=self._classes_of(RECIPES)):
                yield TextLines(classes="heading")
                yield RowList(id="recipe-rows")
            with Vertical(id=FIELDS, classes=self._classes_of(FIELDS)):
                yield TextLines(classes="heading")
                yield self.fields
            yield TabPanel(self._tabs, id=PANEL, classes=self._classes_of(PANEL))
        yield TextLines(id="budget")

    def _classes_of(self, pane: str) -> str:
        return "pane -front" if pane == self.pane else "pane"

    @property
    def panel(self) -> TabPanel:
        """The pane that contains the tabs."""
        return self.query_one(TabPanel)

    def focus_pane(self, pane: str) -> None:
        """Bring a pane to the front and give it the focus."""
        self._bring_to_front(pane)
        self.screen.set_focus(self.query_one(f"#{pane} RowList", RowList))

    def focus_next_pane(self, by: int) -> None:
        """Focus the pane `by` places after the pane in front, or before it if `by` is negative."""
        self.focus_pane(PANES[(PANES.index(self.pane) + by) % len(PANES)])

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Bring the pane with the focus to the front. Each widget sends this message itself, so the messages may arrive
        in another order than that in which the focus moved."""
        if event.widget is self.screen.focused:
            inside = {widget.id for widget in event.widget.ancestors_with_self}
            self._bring_to_front(next(pane for pane in PANES if pane in inside))

    def _bring_to_front(self, pane: str) -> None:
        if pane == self.pane:
            return
        self.pane = pane
        for other in self.query(".pane"):
            other.set_class(other.id == pane, "-front")
        self.post_message(self.Refocused())

    def show_lists(self, snapshot: LaunchSnapshot) -> None:
        """Show the lists of profiles and recipes, with the chosen files marked, and each recipe's verdict."""
        profiles, recipes, ascii_only = snapshot.profiles, snapshot.recipes, self._ascii_only
        chosen = [entry.argument == snapshot.choice.profile for entry in profiles]
        width = file_rows.name_width(profiles)
        self._show_heading(PROFILES, "Profile", chosen)
        self.query_one("#profile-rows", RowList).show([
            file_rows.profile_row(entry, chosen=mark, name_width=width, ascii_only=ascii_only)
            for entry, mark in zip(profiles, chosen, strict=True)
        ])  # fmt: skip
        chosen = [entry.argument == snapshot.choice.recipe for entry in recipes]
        width = file_rows.name_width(recipes)
        self._show_heading(RECIPES, "Recipe", chosen)
        self.query_one("#recipe-rows", RowList).show([
            file_rows.recipe_row(
                entry, snapshot.verdicts.get(entry.argument), chosen=mark, name_width=width, ascii_only=ascii_only
            )
            for entry, mark in zip(recipes, chosen, strict=True)
        ])  # fmt: skip

    def move_cursors(self, profile: int, recipe: int) -> None:
        """Move the cursor of the profile list and the cursor of the recipe list to these rows."""
        self.query_one("#profile-rows", RowList).move_to(profile)
        self.query_one("#recipe-rows", RowList).move_to(recipe)

    def show_fields(self, snapshot: LaunchSnapshot) -> None:
        """Show the fields, each with its problem, and the hint about the field under the cursor."""
        rows = [row._replace(note=glyphs(row.note, ascii_only=self._ascii_only)) for row in snapshot.fields]
        self._changed_fields = sum(row.changed for row in rows)
        problems = {row.key: visible(snapshot.evaluated.problem_of(row.key)) for row in rows}
        self.fields.set_rows(rows, problems, width=self.fields.size.width)
        self.show_hint(snapshot.evaluated)

    def show_hint(self, evaluated: EvaluatedChoice) -> None:
        """Show the key of the field under the cursor with the field's problem, or its description if it has no
        problem."""
        row = self.fields.row
        changed = f"  {self._changed_fields} changed" if self._changed_fields else ""
        self._show_heading(FIELDS, "Fields" + changed, [], visible(row.key) if row is not None else "")
        if row is not None:
            problem = visible(evaluated.problem_of(row.key))
            self.fields.show_hint(problem or field_help(row.key), "$bad" if problem else "$muted")

    def show_budget(self, snapshot: LaunchSnapshot, fix: str = "") -> None:
        """Show verdict, bar, legend and status line; `fix` says which fix the key `a` applies, if one is known."""
        box, ascii_only = self.query_one("#budget", TextLines), self._ascii_only
        look = Look(letters=ascii_only or self.app.no_color, ascii_only=ascii_only)
        lines = budget_lines(snapshot.evaluated, snapshot.last_valid, snapshot.needs, *box.size, fix=fix, look=look)
        box.show(lines)

    def show_panel(self, lines: Sequence[Content]) -> None:
        """Show these lines in the pane of the tabs, for the open tab."""
        self.panel.show(lines, self._front_mark(PANEL))

    def _show_heading(self, pane: str, text: str, chosen: Sequence[bool], right: str = "") -> None:
        """Show the heading of the pane `pane`: `text`, and `right` at the right end. `chosen` says for each row of the
        pane's list whether it is the chosen one; the heading then also shows the place of that row and the number of
        rows."""
        count = f"  {chosen.index(True) + 1} of {len(chosen)}" if True in chosen else ""
        style = "bold" if pane == self.pane else "bold $muted"
        line = Content.assemble((self._front_mark(pane), "bold $info"), (text + count, style))
        heading = self.query_one(f"#{pane} > .heading", TextLines)
        gap = heading.size.width - line.cell_length - len(right) - 1
        heading.show([Content.assemble(line, " " * gap, (right, "$muted")) if right and gap > 0 else line])

    def _front_mark(self, pane: str) -> str:
        return glyphs("▶ ", ascii_only=self._ascii_only) if pane == self.pane else "  "
