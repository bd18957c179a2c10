"""The layout of the Launch screen: the settings, the tabs, and the budget under them; over settings and tabs, while it
is open, the list of profiles or of recipes.

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
from tui.launch.fields import PROFILE, RECIPE, field_help
from tui.launch.snapshot import LaunchSnapshot
from tui.theme import glyphs
from tui.widgets.memory_bar import Look
from tui.widgets.row_list import RowList
from tui.widgets.tab_panel import TabPanel
from tui.widgets.text_lines import TextLines

PANES = FIELDS, PANEL = ("field-pane", "panel")
PICKER = "picker"
"""The list of profiles or recipes, which takes the place of the panes while it is open."""


class LaunchView(Vertical):
    """The widget that fills the Launch screen: settings, tabs, and the budget below."""

    class Refocused(Message):
        """Message: another pane came to the front."""

    def __init__(self, tabs: Sequence[str], fields: FieldList, *, ascii_only: bool) -> None:
        """`tabs` are the names of the tabs, `fields` is the list of settings."""
        super().__init__(id="launch")
        self._tabs, self._ascii_only = tabs, ascii_only
        self.fields = fields
        self._changed_fields = 0
        self.pane = FIELDS
        """The pane in front."""
        self.picked = ""
        """The list that is open: PROFILE or RECIPE; empty if none is."""

    def compose(self) -> ComposeResult:
        """Yield the list of files, the panes, then the budget."""
        with Vertical(id=PICKER):
            yield TextLines(classes="heading")
            yield RowList(id="picker-rows")
        with Container(id="panes"):
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
        inside = {widget.id for widget in event.widget.ancestors_with_self}
        if event.widget is self.screen.focused and PICKER not in inside:
            self._bring_to_front(next(pane for pane in PANES if pane in inside))

    def _bring_to_front(self, pane: str) -> None:
        if pane == self.pane:
            return
        self.pane = pane
        for other in self.query(".pane"):
            other.set_class(other.id == pane, "-front")
        self.post_message(self.Refocused())

    @property
    def picker(self) -> RowList:
        """The rows of the list of profiles or recipes."""
        return self.query_one("#picker-rows", RowList)

    def open_picker(self, kind: str, chosen: int, count: int) -> None:
        """Show the list of the `count` profiles (`kind` PROFILE) or recipes (RECIPE) in place of the panes, with the
        cursor on the row `chosen`. The rows are empty until `show_picker`; keys move the cursor through them at
        once."""
        self.picked = kind
        self.set_class(True, "-picking")
        self.picker.show([Content("")] * count)
        self.picker.cursor = chosen
        self.screen.set_focus(self.picker)

    def close_picker(self) -> None:
        """Show the panes again."""
        self.picked = ""
        self.set_class(False, "-picking")
        self.focus_pane(self.pane)

    def show_picker(self, snapshot: LaunchSnapshot) -> None:
        """Show the rows of the open list: each file with its verdict, or why it does not match this machine."""
        if not self.picked:
            return
        kind, ascii_only = self.picked, self._ascii_only
        entries = snapshot.profiles if kind == PROFILE else snapshot.recipes
        argument = snapshot.choice.profile if kind == PROFILE else snapshot.choice.recipe
        names = file_rows.name_width(entries, self.size.width)
        rows = []
        for entry in entries:
            chosen = entry.argument == argument
            if kind == PROFILE:
                rows.append(file_rows.profile_row(entry, chosen=chosen, name_width=names, ascii_only=ascii_only))
            else:
                verdict = snapshot.verdicts.get(entry.argument)
                rows.append(file_rows.recipe_row(entry, verdict, chosen=chosen, name_width=names,
                                                 ascii_only=ascii_only))  # fmt: skip
        self.picker.show(rows)
        on = f", with their verdicts on {visible(snapshot.profile_name)}" if kind == RECIPE else ""
        title = Content.assemble(
            (f" {len(entries)} {kind}s", "bold"), (f"{on}; enter chooses, esc goes back", "$muted")
        )
        self.query_one(f"#{PICKER} > .heading", TextLines).show([title])

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
        self._show_heading("Settings" + changed, visible(row.key) if row is not None else "")
        if row is not None:
            problem = visible(evaluated.problem_of(row.key))
            self.fields.show_hint(problem or field_help(row.key), "$bad" if problem else "$muted")

    def show_budget(self, snapshot: LaunchSnapshot, fix: str = "") -> None:
        """Show verdict, bar, legend and status line; `fix` says which fix the key `a` applies, if one is known."""
        box, ascii_only = self.query_one("#budget", TextLines), self._ascii_only
        look = Look(letters=ascii_only or self.app.no_color, ascii_only=ascii_only)
        lines = budget_lines(
            snapshot.evaluated, snapshot.last_valid, snapshot.needs, *box.size, fix=fix, basis=snapshot.basis, look=look
        )
        box.show(lines)

    def show_panel(self, lines: Sequence[Content]) -> None:
        """Show these lines in the pane of the tabs, for the open tab."""
        self.panel.show(lines, self._front_mark(PANEL))

    def _show_heading(self, text: str, right: str) -> None:
        """Show the heading of the settings: `text`, and `right` at the right end."""
        style = "bold" if self.pane == FIELDS else "bold $muted"
        line = Content.assemble((self._front_mark(FIELDS), "bold $info"), (text, style))
        heading = self.query_one(f"#{FIELDS} > .heading", TextLines)
        gap = heading.size.width - line.cell_length - len(right) - 1
        heading.show([Content.assemble(line, " " * gap, (right, "$muted")) if right and gap > 0 else line])

    def _front_mark(self, pane: str) -> str:
        return glyphs("▶ ", ascii_only=self._ascii_only) if pane == self.pane else "  "
