"""Launch: choose a profile and a recipe, change their settings, see the predicted memory, start the run.

The screen turns keys into changes of a `LaunchState` and hands its snapshot to the `LaunchView`. `tui.launch.evaluate`
says what a choice means, `tui.launch.fields` which fields there are.

Try: `tunedeck -p demo -r demo`
"""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.timer import Timer

from tui.files.catalog import read_machine
from tui.keys import Key, bindings
from tui.launch.choice import Choice
from tui.launch.field_list import FieldList
from tui.launch.fields import OTHER, allowed_values
from tui.launch.simulator import Simulator
from tui.launch.snapshot import LaunchSnapshot
from tui.launch.state import LaunchState
from tui.launch.tabs import COMMAND, DIFFERENCE, FIXES, SAMPLES, TABS, TabContents
from tui.launch.view import FIELDS, PANEL, LaunchView
from tui.screens.base import creations
from tui.screens.data_keys import DataKeys
from tui.screens.picker_keys import WHILE_PICKING
from tui.widgets.input_prompt import InputPrompt
from tui.widgets.memory_phases import planned_memory
from tui.widgets.row_list import RowList

ENTER_ACTIONS = {FIXES: "apply", SAMPLES: "samples", COMMAND: "copy", DIFFERENCE: "next_pane"}
"""The action of Enter in each tab."""

ENTER_LABELS = {FIXES: "apply this", SAMPLES: "read", COMMAND: "copy", DIFFERENCE: "settings"}
"""What the footer says of Enter in each tab."""

IDLE_SECONDS = 0.15
"""Advice is computed after a pause in the typing as long as this."""

LENGTHS_SECONDS = 1.5
"""The data are read after a pause as long as this."""

VERDICT_SECONDS = 0.02
"""Pause between the verdicts of two recipes, in which keys are handled."""


class LaunchScreen(DataKeys):
    """The screen on which a run is configured and started: profile, recipe, settings, tabs and the memory budget."""

    screen_name = "launch"
    BINDINGS = bindings("launch")
    AUTO_FOCUS = ""

    def __init__(self) -> None:
        super().__init__()
        self._settings: object = None
        self._wanted = ""
        """The setting on which the cursor is to be as soon as there are rows."""
        self._idle_timer: Timer | None = None
        self._lengths_timer: Timer | None = None

    def compose_body(self) -> ComposeResult:
        """Yield the `LaunchView` and the prompt for names."""
        fields = FieldList(allowed_values, self._before_edit, self._on_typed, ascii_only=self.console.ascii_only)
        yield LaunchView(TABS, fields, ascii_only=self.console.ascii_only)
        yield InputPrompt()

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
        self.tab_contents = TabContents(self.state, runs=runs, ascii_only=ascii_only, letters=self.app.no_color)

    def on_screen_resume(self) -> None:
        """Read the profile and recipe files again, since they may have changed, and apply new settings if there are
        any."""
        super().on_screen_resume()
        if self.focused is None:
            self.view.focus_pane(self.view.pane)
        settings, self._settings = self._settings, None
        opened = settings is not None or not self.state.profiles
        if settings is not None and self.view.picked:
            self.close_picker(keep=False)
        self.state.begin(settings)
        self.call_after_refresh(self._show)
        if opened:
            self.call_after_refresh(self._go_to_first_setting)

    def on_screen_suspend(self) -> None:
        """Forget the setting that was asked for: the cursor stays where the user leaves it."""
        super().on_screen_suspend()
        self._wanted = ""

    def on_resize(self, event: events.Resize) -> None:
        """Format all panes for the new width."""
        super().on_resize(event)
        if self.state.profiles:
            self.call_after_refresh(self._show)

    def repaint_panes(self) -> None:
        """Format all panes for the sizes that they have now."""
        self._show()

    # Showing the state.

    def show_choice(self) -> None:
        """Show the choice after it changed."""
        self._show()

    def _go_to_first_setting(self) -> None:
        """Move the cursor to the setting that was asked for, else to the first that must be changed before the run can
        start; if none must, to the first one after profile and recipe."""
        rows = [row.key for row in self.state.field_rows()]
        row = next((problem.row for problem in self.state.evaluated.problems if problem.row), rows[2])
        row = self._wanted if self._wanted in rows else row
        self.view.focus_pane(FIELDS)
        self.view.fields.move_to(row)

    def go_to_setting(self, key: str) -> None:
        """Move the cursor to the setting `key`, if it has a row for the chosen recipe, as soon as there are rows."""
        self._wanted = key
        if self.state.profiles:
            self.call_after_refresh(self._go_to_first_setting)

    def _show(self) -> None:
        """Show the state after a change of the choice. Advice and verdicts of other recipes take longer and are
        computed when the screen is idle."""
        self.view.show_picker(self.state.snapshot())
        self._show_without_lists()

    def _show_without_lists(self) -> None:
        """Show everything that a letter typed in a field can change: all but the list of files."""
        snapshot = self.state.snapshot()
        self.view.show_fields(snapshot)
        self.show_tab()
        self._show_budget(snapshot)
        for timer in (self._idle_timer, self._lengths_timer):
            if timer is not None:
                timer.stop()
        self._idle_timer = self.set_timer(IDLE_SECONDS, self._while_idle)
        self._lengths_timer = self.set_timer(LENGTHS_SECONDS, self.read_lengths)

    def _while_idle(self) -> None:
        """Compute the fixes for the present choice first, then on each further call one recipe's verdict, until all are
        known. Behind another screen nothing is computed: `on_screen_resume` starts again."""
        if not self.is_active:
            return
        if self.state.advice() is None and self.state.advice(compute=True) is not None:
            self.show_tab()
            self._show_budget(self.state.snapshot())
        if not self.state.time() and self.state.time(compute=True):
            self._show_budget(self.state.snapshot())
        self._simulator.start(self.state.simulation)
        self.refresh_title_and_footer()
        if self.view.picked and self.state.compute_next_verdict():
            self.view.show_picker(self.state.snapshot())
            self._idle_timer = self.set_timer(VERDICT_SECONDS, self._while_idle)

    def _show_simulated(self, problem: str) -> None:
        """Show the plan or the fixes that a simulation was made for, or why it failed."""
        self.state.simulated(problem)
        self._show()

    def show_tab(self) -> None:
        """Show the lines of the open tab."""
        self.view.show_panel(self.tab_contents.lines(self.view.panel.tab, self._panel_width))

    def show_budget(self) -> None:
        """Show verdict, memory bar and status line."""
        self._show_budget(self.state.snapshot())

    def _show_budget(self, snapshot: LaunchSnapshot) -> None:
        self.view.show_budget(snapshot, self.tab_contents.fix(self._fix_line, self._panel_width))

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
        """Choose the profile or recipe under the cursor of the open list; in the tab of fixes, say which fix that
        is."""
        if event.rows.id == "picker-rows":
            self.pick(event.index)
        elif event.rows.id == f"{PANEL}-rows":
            self._show_hint()
            self._show_budget(self.state.snapshot())

    def _show_hint(self) -> None:
        """Show what is to be said about the setting under the cursor; while the fixes are in front, about the fix."""
        on_fix = self.view.pane == PANEL and self.view.panel.tab == FIXES
        notes = self.tab_contents.notes(self._fix_line, self._panel_width) if on_fix else ""
        if notes:
            self.view.fields.show_hint(notes, "$muted")
        else:
            self.view.show_hint(self.state.evaluated)

    def on_row_list_selected(self) -> None:
        """Do the same as `do_enter` when Enter is pressed in a list."""
        self.action_press("enter")

    def do_enter(self) -> None:
        """Keep the file under the cursor of the open list, edit a setting, or perform the action of the open tab."""
        if self.view.picked:
            self.close_picker(keep=True)
        elif self.view.pane == PANEL:
            self.action_press(ENTER_ACTIONS[self.view.panel.tab])
        else:
            self.view.fields.edit()

    def on_field_list_pick_asked(self, event: FieldList.PickAsked) -> None:
        """Open the list of profiles or recipes when Enter is pressed on its row."""
        self.action_press(f"pick_{event.kind}")

    def step_back(self) -> bool:
        """Close the open list of files, take back a value that is refused, or show all panes again; False if there is
        nothing to undo."""
        if self.view.picked:
            self.close_picker(keep=False)
            return True
        row = self.view.fields.row
        if row is not None and row.changed and self.state.evaluated.problem_of(row.key):
            self.do_restore()
            self.show_message(f"{row.key} has the value of its file again; u undoes this, esc leaves")
            return True
        return super().step_back()

    def do_next_pane(self) -> None:
        """Give the focus to the next pane; while a list of files is open, open the other one."""
        self._next_pane(1)

    def do_previous_pane(self) -> None:
        """Give the focus to the previous pane; while a list of files is open, open the other one."""
        self._next_pane(-1)

    def _next_pane(self, by: int) -> None:
        if self.view.picked:
            self.action_press("pick_recipe" if self.view.picked == "profile" else "pick_profile")
        else:
            self.view.focus_next_pane(by)
            self._show_hint()

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
        self.show_tab()
        self._show_budget(self.state.snapshot())
        self.refresh_title_and_footer()

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
        """All keys, with what enter does now; while a list is open, the keys that end the choosing first."""
        if not self.view.picked:
            label = ENTER_LABELS[self.view.panel.tab] if self.view.pane == PANEL else "edit"
            rows = super().footer_rows()
            return [key._replace(label=label) if key.action == "enter" else key for key in rows]
        others = (key for key in super().footer_rows() if key.action not in ("enter", "undo"))
        return [*WHILE_PICKING, *others]

    def on_field_list_highlighted(self) -> None:
        """Show the hint of the setting under the cursor."""
        self._show_hint()
        self.refresh_title_and_footer()

    def disabled_reason(self, action: str) -> str | None:
        """Why a key has no effect for the present choice; None if the key has an effect."""
        if action in ("start", "force", "queue"):
            creating = "a run is being created" if creations(self.workers) else None
            return creating or self.state.evaluated.start_refusal(action)
        if action == "apply" and (self.state.evaluated.plan is None or self._advice_is_empty()):
            return "no change to apply"
        if action == "memory" and self.state.evaluated.plan is None:
            return "there is no plan"
        if action == "undo" and not self.state.can_undo:
            return "no changes yet"
        if action == "undo" and self.view.picked:
            return "a list is open; esc returns to the previous file"
        row = self.view.fields.row
        if action == "restore" and (row is None or not row.changed):
            return "this field has the value of its file"
        if action == "toggle" and (row is None or not row.is_stage or self.view.pane != FIELDS):
            return "the cursor is not on a stage, which space skips or includes"
        if action == "save" and not self.state.changed_kinds:
            return "no changes to save"
        return None

    def _advice_is_empty(self) -> bool:
        advice = self.state.advice()
        return advice is not None and not advice.suggestions and not advice.room

    def do_apply(self) -> None:
        """Apply the fix under the cursor, or the first fix if the cursor is on none."""
        suggestion = self.tab_contents.suggestion(self._fix_line, self._panel_width)
        if suggestion is None:
            self.show_message("no change to apply", "$caution")
        else:
            self.show_message(f"applied {self.state.apply(suggestion)}; u undoes it")
            self._show()

    def do_undo(self) -> None:
        """Return to the choice before the last change."""
        self.state.undo()
        self.show_message("undone")
        self._show()

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
