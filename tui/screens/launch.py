"""Launch: choose a profile and a recipe, change their values, see the predicted memory, start the run.

The screen turns keys into changes of a `LaunchState` and hands its snapshot to the `LaunchView`. `tui.launch.evaluate`
says what a choice means, `tui.launch.fields` which fields there are.

Try: `tunedeck -p demo -r demo`
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from textual import events
from textual.app import ComposeResult
from textual.timer import Timer

from engine.config.files.find import SpecKind
from engine.config.files.text import visible
from engine.errors import TunedeckError
from tui.files.catalog import read_machine
from tui.keys import Key, bindings
from tui.launch.choice import Choice
from tui.launch.field_list import FieldInput, FieldList
from tui.launch.fields import OTHER, allowed_values
from tui.launch.simulator import Simulator
from tui.launch.state import LaunchSnapshot, LaunchState
from tui.launch.tabs import COMMAND, FIXES, SAMPLES, TABS, TabContents
from tui.launch.view import FIELDS, PANEL, RECIPES, LaunchView
from tui.screens.base import creations
from tui.screens.creation_keys import CreationKeys
from tui.widgets.input_prompt import InputPrompt
from tui.widgets.memory_phases import planned_memory
from tui.widgets.row_list import RowList

ENTER_ACTIONS = {FIXES: "apply", SAMPLES: "samples", COMMAND: "copy"}
"""The action of Enter in each tab."""

IDLE_SECONDS = 0.15
"""Advice is computed after a pause in the typing as long as this."""

VERDICT_SECONDS = 0.02
"""Pause between the verdicts of two recipes, in which keys are handled."""


WHILE_EDITING = [
    Key("launch", "enter", "keep", "keep", "keep what was typed"),
    Key("launch", "escape", "discard", "discard", "discard what was typed"),
]
"""The keys that are not letters of the field being edited."""

READING = "reading the data: a process with the tokenizer starts ..."


class LaunchScreen(CreationKeys):
    """The screen on which a run is configured and started: profile, recipe, fields, tabs and the memory budget."""

    screen_name = "launch"
    BINDINGS = bindings("launch")
    AUTO_FOCUS = ""

    def __init__(self) -> None:
        super().__init__()
        self._settings: object = None
        self._idle_timer: Timer | None = None

    def compose_body(self) -> ComposeResult:
        """Yield the `LaunchView` and the prompt for names."""
        fields = FieldList(allowed_values, self._before_edit, self._on_typed, ascii_only=self.console.ascii_only)
        recipe_given = isinstance(self._settings, Mapping) and bool(self._settings.get("recipe"))
        yield LaunchView(TABS, fields, FIELDS if recipe_given else RECIPES, ascii_only=self.console.ascii_only)
        yield InputPrompt()

    @property
    def view(self) -> LaunchView:
        """The widget that fills the screen between title bar and footer."""
        return self.query_one(LaunchView)

    @property
    def choice(self) -> Choice:
        """The present choice, of which the keys make runs."""
        return self.state.choice

    def set_argument(self, argument: object) -> None:
        """Take the settings to begin with: a dict of profile, recipe and overrides, such as those of an earlier run."""
        if argument is not None:
            self._settings = argument

    def on_mount(self) -> None:
        """Detect this machine's devices and create the state."""
        self.state = LaunchState(read_machine(), self.console.runs_dir)
        self._simulator = Simulator(self.app, self._show_simulated)
        runs, ascii_only = self.console.flags.runs, self.console.ascii_only
        self._tab_contents = TabContents(self.state, runs=runs, ascii_only=ascii_only, letters=self.app.no_color)

    def on_screen_resume(self) -> None:
        """Read the profile and recipe files again, since they may have changed, and apply new settings if there are
        any."""
        super().on_screen_resume()
        if self.focused is None:
            self.view.focus_pane(self.view.pane)
        settings, self._settings = self._settings, None
        opened = settings is not None or not self.state.profiles
        self.state.begin(settings)
        self.call_after_refresh(self._show_with_cursors)
        if opened:
            self.call_after_refresh(self._go_to_problem)

    def on_resize(self, event: events.Resize) -> None:
        """Format all panes for the new width."""
        super().on_resize(event)
        if self.state.profiles:
            self.call_after_refresh(self._show)

    def repaint_panes(self) -> None:
        """Format all panes for the sizes that they have now."""
        self._show()

    # Showing the state.

    def _show_with_cursors(self) -> None:
        self._show()
        self.view.move_cursors(*self.state.positions)

    def _go_to_problem(self) -> None:
        """Move the cursor to the first field that must be changed before the run can start, if there is one."""
        row = next((problem.row for problem in self.state.evaluated.problems if problem.row), None)
        if row is not None:
            self.view.focus_pane(FIELDS)
            self.view.fields.move_to(row)

    def _show(self) -> None:
        """Show the state after a change of the choice. Advice and verdicts of other recipes take longer and are
        computed when the screen is idle."""
        self.view.show_lists(self.state.snapshot())
        self._show_without_lists()

    def _show_without_lists(self) -> None:
        """Show everything that a letter typed in a field can change: all but the lists of files."""
        snapshot = self.state.snapshot()
        self.view.show_fields(snapshot)
        self._show_tab()
        self._show_budget(snapshot)
        if self._idle_timer is not None:
            self._idle_timer.stop()
        self._idle_timer = self.set_timer(IDLE_SECONDS, self._while_idle)

    def _while_idle(self) -> None:
        """Compute the fixes for the present choice first, then on each further call one recipe's verdict, until all are
        known. Behind another screen nothing is computed: `on_screen_resume` starts again."""
        if not self.is_active:
            return
        if self.state.advice() is None and self.state.advice(compute=True) is not None:
            self._show_tab()
            self._show_budget(self.state.snapshot())
        if not self.state.time() and self.state.time(compute=True):
            self._show_budget(self.state.snapshot())
        self._simulator.start(self.state.simulation)
        self.refresh_title_and_footer()
        if self.state.compute_next_verdict():
            self.view.show_lists(self.state.snapshot())
            self._idle_timer = self.set_timer(VERDICT_SECONDS, self._while_idle)

    def _show_simulated(self, problem: str) -> None:
        """Show the plan or the fixes that a simulation was made for, or why it failed."""
        self.state.simulated(problem)
        self._show()

    def _show_tab(self) -> None:
        self.view.show_panel(self._tab_contents.lines(self.view.panel.tab, self._panel_width))

    def _show_budget(self, snapshot: LaunchSnapshot) -> None:
        self.view.show_budget(snapshot, self._tab_contents.fix(self._fix_line, self._panel_width))

    @property
    def _panel_width(self) -> int:
        return max(16, self.view.panel.size.width - 1)

    @property
    def _fix_line(self) -> int | None:
        """The line under the cursor in the tab of fixes; None in another tab."""
        return self.view.panel.line if self.view.panel.tab == FIXES else None

    # Moving between panes and tabs.

    def on_launch_view_refocused(self) -> None:
        """Show everything again: the headings have changed, and the pane now in front may not have had a size
        before."""
        if self.state.profiles:
            self.call_after_refresh(self._show)

    def on_row_list_highlighted(self, event: RowList.Highlighted) -> None:
        """Choose the profile or recipe under the cursor; in the tab of fixes, say which fix that is."""
        state = self.state
        if event.rows.id == "profile-rows":
            self._change(replace(state.choice, profile=state.profiles[event.index].argument))
        elif event.rows.id == "recipe-rows":
            self._change(replace(state.choice, recipe=state.recipes[event.index].argument))
        elif event.rows.id == f"{PANEL}-rows":
            self._show_budget(state.snapshot())

    def on_row_list_selected(self) -> None:
        """Do the same as `do_enter` when Enter is pressed in a list."""
        self.action_press("enter")

    def do_enter(self) -> None:
        """Go from a list of files to the next pane, edit a field, or perform the action of the open tab."""
        if self.view.pane == PANEL:
            self.action_press(ENTER_ACTIONS[self.view.panel.tab])
        elif self.view.pane == FIELDS:
            self.view.fields.edit()
        else:
            self.do_next_pane()

    def do_next_pane(self) -> None:
        """Give the focus to the next pane."""
        self.view.focus_next_pane(1)

    def do_previous_pane(self) -> None:
        """Give the focus to the previous pane."""
        self.view.focus_next_pane(-1)

    def do_next_tab(self) -> None:
        """Open the next tab (fixes, samples, command)."""
        self._next_tab(1)

    def do_previous_tab(self) -> None:
        """Open the previous tab (fixes, samples, command)."""
        self._next_tab(-1)

    def action_open_tab(self, tab: str) -> None:
        """Open a tab whose name was clicked."""
        self._next_tab(TABS.index(tab) - TABS.index(self.view.panel.tab))

    def _next_tab(self, by: int) -> None:
        self.view.panel.next_tab(by)
        if self.has_class("-one-pane"):
            self.view.focus_pane(PANEL)
        self._show_tab()
        self._show_budget(self.state.snapshot())

    # Changing the choice.

    def _change(self, choice: Choice) -> None:
        if choice != self.state.choice:
            self.state.change(choice)
            self._show()

    def _before_edit(self) -> None:
        """Store the choice for undo before a field is edited."""
        self.state.remember()

    def _on_typed(self, key: str, text: str) -> None:
        """Set the field `key` to `text`, at every letter typed. The row for any other KEY=VALUE is an exception: it is
        applied when editing ends."""
        if key != OTHER:
            self.state.set_field(key, text)
            self._show_without_lists()

    def on_field_list_edit_ended(self, event: FieldList.EditEnded) -> None:
        """Apply the KEY=VALUE that was typed in the row for any other key."""
        key, equals, text = event.text.partition("=")
        if event.key == OTHER and equals:
            self._change(self.state.choice.with_field(key.strip(), text.strip()))
        elif event.key == OTHER and event.text:
            self.show_message("KEY=VALUE is needed, such as train.label_smoothing=0.1", "$caution")
        self.view.show_fields(self.state.snapshot())
        self.refresh_title_and_footer()

    def footer_rows(self) -> list[Key]:
        """While a field is edited, only the keys that end it: all others are letters of its text."""
        return WHILE_EDITING if self.view.fields.is_edited else super().footer_rows()

    def do_keep(self) -> None:
        """End the editing of a field."""
        self.query_one(FieldInput).action_leave()

    def do_discard(self) -> None:
        """End the editing of a field without what was typed."""
        self.query_one(FieldInput).action_discard()

    def on_field_list_highlighted(self) -> None:
        """Show the hint of the field under the cursor."""
        self.view.show_hint(self.state.evaluated)
        self.refresh_title_and_footer()

    def disabled_reason(self, action: str) -> str | None:
        """Why a key has no effect for the present choice; None if the key has an effect."""
        if action in ("start", "force", "queue"):
            creating = "a run is being created" if creations(self.workers) else None
            return creating or self.state.evaluated.start_refusal(action)
        if action == "apply" and (self.state.evaluated.plan is None or self._advice_is_empty()):
            return "there is no change to apply"
        if action == "memory" and self.state.evaluated.plan is None:
            return "there is no plan"
        if action == "undo" and not self.state.can_undo:
            return "nothing was changed yet"
        row = self.view.fields.row
        if action == "restore" and (row is None or not row.changed):
            return "this field has the value of its file"
        if action == "toggle" and (row is None or not row.is_stage or self.view.pane != FIELDS):
            return "space switches a stage off and on: the cursor is on none"
        if action == "save" and not self.state.changed_kinds:
            return "nothing was changed: there is nothing to save"
        return None

    def _advice_is_empty(self) -> bool:
        advice = self.state.advice()
        return advice is not None and not advice.suggestions and not advice.room

    def do_apply(self) -> None:
        """Apply the fix under the cursor, or the first fix if the cursor is on none."""
        suggestion = self._tab_contents.suggestion(self._fix_line, self._panel_width)
        if suggestion is None:
            self.show_message("there is no change to apply", "$caution")
        else:
            self.show_message(f"applied {self.state.apply(suggestion)}; u takes it back")
            self._show()

    def do_undo(self) -> None:
        """Return to the choice before the last change, and move the cursors of the lists to its files."""
        self.state.undo()
        self._show_with_cursors()

    def do_restore(self) -> None:
        """Reset the field under the cursor to the value in its file."""
        row = self.view.fields.row
        if row is not None:
            self._change(self.state.choice.without_field(row.key))

    def do_toggle(self) -> None:
        """Switch the stage under the cursor off, or on again."""
        row = self.view.fields.row
        if row is not None:
            self.state.toggle_stage(row)
            self._show()

    def do_memory(self) -> None:
        """Open the screen with the predicted memory by phase."""
        plan, choice = self.state.evaluated.plan, self.state.choice
        if plan is not None:
            self.console.open_screen("memory", planned_memory(f"{choice.recipe} on {choice.profile}", plan.as_json()))

    # Samples, the command and files made from the choice.

    def do_copy(self) -> None:
        """Copy the command that starts the same run without the console to the terminal's clipboard."""
        self.app.copy_to_clipboard(shlex.join(self._tab_contents.command()))
        self.show_message("the command was sent to the terminal's clipboard")

    def do_samples(self) -> None:
        """Read samples of the data in a separate process and show them in the samples tab."""
        self._tab_contents.samples_status = READING
        self._show_tab()
        self.run_worker(self._read_samples(self.state.choice), group="samples", exclusive=True)

    async def _read_samples(self, choice: Choice) -> None:
        await self._tab_contents.read_samples(choice)
        self._show_tab()

    def do_save(self) -> None:
        """Ask for a name, and save the changed recipe or profile as a new file; if both are changed, the recipe
        first."""
        kind = self.state.changed_kinds[0]
        ask = self.query_one(InputPrompt).ask
        ask(f"save as a new {kind}, named", self.state.unused_name(kind), lambda name: self._save(kind, name))

    def _save(self, kind: SpecKind, name: str) -> None:
        try:
            path = self.state.save(kind, name)
        except TunedeckError as error:
            self.show_error(error)
            return
        self._show_with_cursors()
        self.show_message(f"saved {visible(str(path))}")
        if self.state.changed_kinds:
            self.do_save()
