"""Launch: choose a profile and a recipe, change what should be other, see what it costs, start it.

The screen turns keys into changes of a `Bench` and shows what that comes to. What a choice means is
`tui.launch.choice`, its rows are `tui.launch.fields`, how it looks is `tui.launch.view`.

Try: `tunedeck -p demo -r demo`
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.content import Content
from textual.timer import Timer

from engine.budget.advise.fit import Suggestion
from engine.errors import TunedeckError
from engine.spec.files.find import SpecKind
from engine.spec.files.text import visible
from tui.files.catalog import read_machine
from tui.keys import bindings
from tui.launch.choice import Choice, command, command_lines, data_arguments, refusal
from tui.launch.field_list import Fields
from tui.launch.fields import OTHER, choices
from tui.launch.fixes import FixLine, fix_lines
from tui.launch.read_samples import read_samples
from tui.launch.samples import sample_lines
from tui.launch.state import Bench
from tui.launch.view import FIELDS, PANEL, LaunchView
from tui.screens.base import BaseScreen
from tui.widgets.input_prompt import Prompt
from tui.widgets.row_list import Rows

FIXES, SAMPLES, COMMAND = TABS = ("fixes", "samples", "command")

ENTER = {FIXES: "apply", SAMPLES: "samples", COMMAND: "copy"}
"""What Enter does in each tab."""

IDLE_SECONDS = 0.15
"""A pause in the typing after which advice is worked out."""

VERDICT_SECONDS = 0.02
"""Between the verdicts of two recipes: keys come first."""


class LaunchScreen(BaseScreen):
    """Profile, recipe, fields, the VRAM bar, and what helps."""

    where = "launch"
    AUTO_FOCUS = "#field-rows"
    BINDINGS = bindings("launch")

    def __init__(self) -> None:
        super().__init__()
        self._settings: object = None
        self._fixes: list[FixLine] = []
        self._report: tuple[Choice, Mapping[str, Any]] | None = None
        self._reading = ""
        """What the samples tab says while there are none."""
        self._idle: Timer | None = None

    def body(self) -> ComposeResult:
        """The view, and the prompt."""
        fields = Fields(choices, self._begun, self._typed, ascii_only=self.console.ascii_only)
        yield LaunchView(TABS, fields, ascii_only=self.console.ascii_only)
        yield Prompt()

    @property
    def view(self) -> LaunchView:
        """What is shown."""
        return self.query_one(LaunchView)

    def receive(self, argument: object) -> None:
        """A dict of profile, recipe and overrides to begin with, such as those of a run that is to be repeated."""
        if argument is not None:
            self._settings = argument

    def on_mount(self) -> None:
        """Look at the machine."""
        self._bench = Bench(read_machine())

    def on_screen_resume(self) -> None:
        """Shown: files may have come or changed, and there may be something to begin with."""
        super().on_screen_resume()
        settings, self._settings = self._settings, None
        self._bench.begin(settings)
        self.call_after_refresh(self._show_whole)

    def on_resize(self, event: events.Resize) -> None:
        """Everything is made for a width."""
        super().on_resize(event)
        if self._bench.profiles:
            self.call_after_refresh(self._show)

    # Showing.

    def _show_whole(self) -> None:
        self._show()
        self.view.put_cursors(*self._bench.places)

    def _show(self) -> None:
        """After every change. Whatever is dearer than a plan waits for a pause."""
        self._show_lists()
        self._show_typed()

    def _show_typed(self) -> None:
        """What a letter in a field can change."""
        self._show_fields()
        self.view.show_budget(self._bench.outcome, self._bench.sound)
        self._show_panel()
        if self._idle is not None:
            self._idle.stop()
        self._idle = self.set_timer(IDLE_SECONDS, self._while_idle)

    def _while_idle(self) -> None:
        if self._bench.advice() is None and self._bench.advice(work=True) is not None:
            self._show_panel()
        self.refresh_bars()
        if self._bench.next_verdict():
            self._show_lists()
            self._idle = self.set_timer(VERDICT_SECONDS, self._while_idle)

    def _show_fields(self) -> None:
        rows = [row._replace(beside=self.draw(row.beside)) for row in self._bench.rows()]
        self.view.show_fields(rows, self._bench.outcome)

    def _show_lists(self) -> None:
        bench = self._bench
        self.view.show_lists(bench.profiles, bench.recipes, bench.choice, bench.verdicts)

    def _show_panel(self) -> None:
        panel = self.view.panel
        lines = {FIXES: self._fix_lines, SAMPLES: self._sample_lines, COMMAND: self._command_lines}[panel.tab]
        self.view.show_panel(lines(max(16, panel.size.width - 1)))

    def _fix_lines(self, width: int) -> list[Content]:
        """Advice of the choice before stays until there is new: a list that flickers cannot be read."""
        advice = self._bench.advice()
        if self._bench.outcome.plan is None:
            self._fixes = []
            return Content.styled("no plan, no advice", "$muted").wrap(width)
        if advice is not None:
            self._fixes = fix_lines(advice, width)
        return [line.content for line in self._fixes]

    def _sample_lines(self, width: int) -> list[Content]:
        if self._reading or self._report is None:
            text = self._reading or "enter reads the data as the model will see them"
            return Content.styled(text, "$muted").wrap(width)
        choice, report = self._report
        aged = Content.styled("from before the last change; enter reads again", "$caution").wrap(width)
        lines = sample_lines(report, width, ascii_only=self.console.ascii_only)
        return lines if choice == self._bench.choice else [*aged, *lines]

    def _command_lines(self, width: int) -> list[Content]:
        lines = [part for line in command_lines(self._command()) for part in Content(visible(line)).wrap(width)]
        return [*lines, Content(""), *Content.styled("What s runs. y copies it.", "$muted").wrap(width)]

    def _command(self) -> list[str]:
        return command(self._bench.choice, runs=self.console.flags.runs)

    # Moving about.

    def on_launch_view_refocused(self) -> None:
        """Another pane is in front: headings change, and it may only now have a size."""
        if self._bench.profiles:
            self.call_after_refresh(self._show)

    def on_rows_moved(self, event: Rows.Moved) -> None:
        """Moving in a list of files is choosing."""
        bench = self._bench
        if event.rows.id == "profile-rows":
            self._change(replace(bench.choice, profile=bench.profiles[event.index].text))
        elif event.rows.id == "recipe-rows":
            self._change(replace(bench.choice, recipe=bench.recipes[event.index].text))

    def on_rows_chosen(self) -> None:
        """Enter in a list."""
        self.action_press("enter")

    def do_enter(self) -> None:
        """Go on to the next pane from a list, edit a field, or do what the open tab is for."""
        if self.view.pane == PANEL:
            self.action_press(ENTER[self.view.panel.tab])
        elif self.view.pane == FIELDS:
            self.view.fields.edit()
        else:
            self.do_next_pane()

    def do_next_pane(self) -> None:
        """The pane after this one."""
        self.view.step(1)

    def do_previous_pane(self) -> None:
        """The pane before this one."""
        self.view.step(-1)

    def do_next_tab(self) -> None:
        """The next tab."""
        self._turn(1)

    def do_previous_tab(self) -> None:
        """The tab before."""
        self._turn(-1)

    def _turn(self, by: int) -> None:
        self.view.panel.turn(by)
        if self.has_class("-one-pane"):
            self.view.go(PANEL)
        self._show_panel()

    # Changing the choice.

    def _change(self, choice: Choice) -> None:
        self._bench.change(choice)
        self._show()

    def _begun(self) -> None:
        """A row is about to be changed."""
        self._bench.remember()

    def _typed(self, key: str, text: str) -> None:
        """The bar follows every letter."""
        if key != OTHER:
            self._bench.type(key, text)
            self._show_typed()

    def on_fields_left(self, event: Fields.Left) -> None:
        """Any other key is taken when its row is left."""
        key, equals, text = event.text.partition("=")
        if event.key == OTHER and equals:
            self._change(self._bench.choice.put(key.strip(), text.strip()))
        elif event.key == OTHER and event.text:
            self.say("KEY=VALUE is needed, such as train.label_smoothing=0.1", "$caution")
        self._show_fields()

    def on_fields_moved(self) -> None:
        """Another row, another hint."""
        self.view.show_hint(self._bench.outcome)
        self.refresh_bars()

    def why_not(self, action: str) -> str | None:
        """Why a key can do nothing now."""
        if action in ("start", "force", "queue"):
            return refusal(self._bench.outcome, action)
        if action == "apply" and (self._bench.outcome.plan is None or self._advised_nothing()):
            return "there is no change to apply"
        if action == "undo" and not self._bench.can_undo:
            return "nothing was changed yet"
        row = self.view.fields.row
        if action == "restore" and (row is None or not row.changed):
            return "this field is as the file has it"
        if action == "save" and not self._bench.unsaved:
            return "nothing was changed: there is nothing to save"
        return None

    def _advised_nothing(self) -> bool:
        advice = self._bench.advice()
        return advice is not None and not advice.suggestions and not advice.room

    def _suggestion(self) -> Suggestion | None:
        """The one under the cursor, else the first. Whoever is faster than the pause gets today's advice, too."""
        panel = self.view.panel
        if self._bench.advice() is None:
            advice = self._bench.advice(work=True)
            self._fixes = fix_lines(advice, panel.size.width) if advice is not None else []
        here = self._fixes[panel.line : panel.line + 1] if panel.tab == FIXES else []
        return next((line.suggestion for line in [*here, *self._fixes] if line.suggestion is not None), None)

    def do_apply(self) -> None:
        """Apply a fix."""
        suggestion = self._suggestion()
        if suggestion is None:
            self.say("there is no change to apply", "$caution")
        else:
            self.say(f"applied {self._bench.apply(suggestion)}; u takes it back")
            self._show()

    def do_undo(self) -> None:
        """Take the last change back."""
        self._bench.undo()
        self._show_whole()

    def do_restore(self) -> None:
        """The row as the file has it."""
        row = self.view.fields.row
        if row is not None:
            self._change(self._bench.choice.without(row.key))

    # Doing something with it.

    def do_start(self) -> None:
        """Start the run."""
        self._start(force=False)

    def do_force(self) -> None:
        """Start it although it does not fit."""
        self._start(force=True)

    def _start(self, *, force: bool) -> None:
        try:
            directory, notices = self._bench.make_run(self.console.runs_dir, force=force)
        except TunedeckError as error:
            self.refuse(error)
            return
        if self.console.start_engine(directory, resume=False):
            self.console.open_screen("run", directory)
            if notices:
                self.console.say("; ".join(map(visible, notices)), "$caution")

    def do_queue(self) -> None:
        """Put the run into the queue."""
        try:
            name, place = self._bench.enqueue_run(self.console.runs_dir)
        except TunedeckError as error:
            self.refuse(error)
            return
        self.say(f"{name} is number {place} in the queue, which 4 shows")

    def do_copy(self) -> None:
        """Copy the command."""
        self.app.copy_to_clipboard(shlex.join(self._command()))
        self.say("the command was sent to the terminal's clipboard")

    def do_samples(self) -> None:
        """Read samples in a process of its own."""
        self._reading = "reading the data: a process with the tokenizer starts, which takes some seconds ..."
        self._show_panel()
        self.run_worker(self._read(self._bench.choice), group="samples", exclusive=True)

    async def _read(self, choice: Choice) -> None:
        try:
            self._report = (choice, await read_samples(data_arguments(choice)))
            self._reading = ""
        except TunedeckError as error:
            self._reading = visible(error.found, keep="\n")
        self._show_panel()

    def do_save(self) -> None:
        """Save what was changed as a new file: the recipe's part, then the profile's."""
        kind = self._bench.unsaved[0]
        ask = self.query_one(Prompt).ask
        ask(f"save as a new {kind}, named", self._bench.name_for(kind), lambda name: self._save(kind, name))

    def _save(self, kind: SpecKind, name: str) -> None:
        try:
            path = self._bench.save(kind, name)
        except TunedeckError as error:
            self.refuse(error)
            return
        self._show_whole()
        self.say(f"saved {visible(str(path))}")
        if self._bench.unsaved:
            self.do_save()
