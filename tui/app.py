"""The console: a Textual application that opens screens and handles the keys that work on every screen.

Console and engine are separate processes that share the run directories, so quitting or killing the console changes no
run. No module of the console imports torch or the parts of the engine that need it.

Try: `tunedeck`, `tunedeck --ascii`, `tunedeck --runs DIR`, `tunedeck -p demo -r demo`
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, cast

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.command import CommandPalette, Provider
from textual.dom import DOMNode
from textual.reactive import Initialize, Reactive
from textual.screen import Screen
from textual.theme import Theme

from engine.config.files.text import visible
from engine.errors import TunedeckError, UsageError
from engine.journal.directory import RunDirectory
from engine.journal.index import list_runs, runs_folder
from tui import arguments, keys
from tui.arguments import Flags
from tui.screens.base import BaseScreen, creations
from tui.screens.table import SCREENS, ScreenRow, screen_row
from tui.terminal import Terminal, watch_for_hangup
from tui.theme import THEMES
from tui.widgets.key_order import SequentialKeysApp

if TYPE_CHECKING:
    from tui.run.engine_processes import EngineProcesses
    from tui.run.run_ends import RunEnds
    from tui.screens.run import RunScreen

HOME = "runs"
"""The screen that `do_back` shows when no earlier screen is left."""

REAP_SECONDS = 1.0
"""Interval at which the engine processes of this console are checked."""

ENDS_SECONDS = 3.0
"""Interval at which the runs folder is searched for runs that have ended."""


PAINTED_SECONDS = 1.0
"""Time after which the first screen is painted, and garbage is collected again (`tunedeck.py` switches that off)."""


def _first_theme(app: DOMNode) -> str:
    """The name of the theme that the console begins with: from its flags or the environment."""
    return arguments.theme_name(cast(TunedeckApp, app).flags, os.environ)


def _is_of_a_run(screen: Screen[object]) -> bool:
    return isinstance(screen, BaseScreen) and screen.screen_name == "run"


def _things_provider() -> type[Provider]:
    """The provider of runs, files, settings and events, which Textual asks for when the palette is opened."""
    from tui.palette import ThingsProvider  # slow to import: not before the first paint

    return ThingsProvider


class TunedeckApp(SequentialKeysApp):
    """The Textual application: opens screens by name, and performs the actions of the keys that work on every
    screen."""

    CSS_PATH = "console.tcss"
    TITLE = "Tunedeck"
    BINDINGS = [  # noqa: RUF012  # Textual's own declaration
        *keys.bindings(keys.EVERYWHERE),
        *(Binding(row.key, f"open_screen({row.name!r})", row.title, show=False) for row in SCREENS if row.key),
    ]
    COMMAND_PALETTE_BINDING = "ctrl+p"
    COMMANDS = App.COMMANDS | {_things_provider}
    # The theme to begin with is a default value: when a theme is set, Textual parses the style sheet a second time.
    theme: Reactive[str] = Reactive(Initialize(_first_theme))

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        # Under NO_COLOR, Textual draws its default colours as shades of grey, the terminal's own colours not at all.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self._visited: list[str] = []
        """Names of the screens that were shown and are kept in memory, for going back; the present one is last."""
        self._left_run: dict[str, RunDirectory] = {}
        """By the name of a kept screen: the run whose screen it was opened from, for going back."""
        self._leaving = False
        """Whether the console closes as soon as the runs that are being created have started."""
        self.runs_dir = runs_folder(flags.runs)
        self._terminal = Terminal(self._write_to_terminal)
        self.ascii_only = arguments.ascii_only(flags, os.environ)

    @property
    def available_themes(self) -> dict[str, Theme]:
        """The themes that can be chosen, by name."""
        return {theme.name: theme for theme in THEMES}

    @cached_property
    def _engine_processes(self) -> EngineProcesses:
        """The engine processes that this console has started."""
        from tui.run.engine_processes import EngineProcesses  # slow to import: not before the first paint

        return EngineProcesses()

    @cached_property
    def _run_ends(self) -> RunEnds:
        """Finds the runs that end while the console is open."""
        from tui.run.run_ends import RunEnds  # slow to import: not before the first paint

        return RunEnds(self.runs_dir)

    def on_mount(self) -> None:
        """Open the Runs screen; if there is no run yet, or the command line names a profile, recipe or setting, the
        Launch screen."""
        self.set_class(self.ascii_only, "-ascii")
        self.set_interval(REAP_SECONDS, self._reap)
        self.set_interval(ENDS_SECONDS, self._tell_ends)
        self.set_timer(PAINTED_SECONDS, _collect_garbage_from_now_on)
        settings = {
            "profile": self.flags.profile, "recipe": self.flags.recipe, "overrides": self.flags.overrides
        }  # fmt: skip
        if any(settings.values()):
            self.open_screen("launch", settings)
        else:
            self.open_screen(HOME if self._has_runs() else "launch")

    def _has_runs(self) -> bool:
        """Whether the Runs screen has something to show: at least one run, or the error with which the runs folder
        cannot be read."""
        try:
            return bool(list_runs(self.runs_dir))
        except OSError:
            return True

    def open_screen(self, name: str, argument: object = None) -> None:
        """Show the screen `name` of `tui.screens.table`, after passing `argument` to its `set_argument`. A screen that
        is kept in memory replaces all open screens; any other is put on top of them. Does nothing while the console is
        about to close and only waits for a new run to start."""
        if self._leaving:
            return
        row = screen_row(name)
        screen = self._get_or_create(row)
        screen.set_argument(argument)
        if not row.kept:
            self.push_screen(screen)
            return
        earlier = self._visited if name != HOME else []
        self._visited = [*(visited for visited in earlier if visited != name), name]
        runs = [cast("RunScreen", each).directory for each in self.screen_stack if _is_of_a_run(each)]
        self._left_run = {key: run for key, run in self._left_run.items() if key in self._visited and key != name}
        self._left_run |= dict.fromkeys([name], runs[-1]) if runs and name != HOME else {}
        while len(self.screen_stack) > 2:
            self.pop_screen()
        if len(self.screen_stack) == 1:
            self.push_screen(screen)
        elif self.screen is not screen:
            self.switch_screen(screen)
        elif argument is not None:
            screen.on_screen_resume()  # it is in front already: only the argument is new

    def _get_or_create(self, row: ScreenRow) -> BaseScreen:
        if row.kept and self.is_screen_installed(row.name):
            return cast(BaseScreen, self.get_screen(row.name))
        screen = getattr(import_module(row.module), row.class_name)()
        if row.kept:
            self.install_screen(screen, row.name)
        return cast(BaseScreen, screen)

    @property
    def front_screen(self) -> object:
        """The screen that is shown."""
        return self.screen

    def action_press(self, action: str) -> None:
        """Perform the action of a key that works on every screen. No screen can disable such a key."""
        getattr(self, f"do_{action}")()

    def start_engine(self, directory: RunDirectory, *, resume: bool) -> bool:
        """Start an engine process on a run and show a message in the footer. Returns False if the process cannot be
        started; the message then says why. `resume`: continue the run instead of beginning it."""
        try:
            warning = self._engine_processes.start(directory, resume=resume)
        except TunedeckError as error:
            self.show_message(error.render().replace("\n", "; "), "bold $bad")
            return False
        except OSError as error:
            self.show_message(f"the engine cannot be started: {error.strerror or error}", "bold $bad")
            return False
        self.show_message(warning or f"the engine is starting: {directory.name}", "$caution" if warning else "")
        return True

    def run_command(self, directory: RunDirectory, command: str, *words: str) -> None:
        """Run `tunedeck COMMAND RUN WORDS` in a process of its own, and show a message when it ends."""
        from tui.run.command_process import run_command  # slow to import: not before the first paint

        self.show_message(
            f"tunedeck {command} {directory.name} has started; its output: {command}.log in the run's folder"
        )
        self.run_worker(run_command(directory, command, words, self._show_end), group="commands")

    def _show_end(self, text: str, failed: bool) -> None:
        self.show_message(text, "$bad" if failed else "")

    def _reap(self) -> None:
        for message in self._engine_processes.unrecorded_ends():
            self.show_message(message, "bold $bad")

    def _tell_ends(self) -> None:
        """Show a message and a notification of the terminal for each run that has ended since the last call."""
        for sentence in self._run_ends.poll():
            self._terminal.notify(sentence)
            self.show_message(sentence)

    def set_terminal_title(self, text: str) -> None:
        """Set the title of the terminal's window to `text`."""
        self._terminal.set_title(text)

    def _write_to_terminal(self, sequence: str) -> None:
        if self._driver is not None and not self.is_headless:
            self._driver.write(sequence)

    def on_unmount(self) -> None:
        """Put the title of the terminal's window back."""
        self._terminal.restore_title()

    def action_open_screen(self, name: str) -> None:
        """Open the screen `name`; Textual calls this for the digit key of the screen."""
        self.open_screen(name)

    def action_help_quit(self) -> None:
        """Show a message that says which key leaves the console. Textual calls this for Ctrl-C, which does not leave
        it."""
        self.show_message("q leaves the console; training continues")

    def show_message(self, text: str, style: str = "") -> None:
        """Show a message in the footer of the present screen, in the Textual style `style`. If the screen was opened
        just now and has no footer yet, the message is shown after its first refresh."""
        screen = self.screen
        if isinstance(screen, BaseScreen) and screen.is_mounted:
            screen.show_message(text, style)
        elif isinstance(screen, BaseScreen):
            screen.call_after_refresh(screen.show_message, text, style)

    def do_help(self) -> None:
        """Open the Help screen, which lists the keys of the present screen first."""
        screen = self.screen.screen_name if isinstance(self.screen, BaseScreen) else ""
        if screen != "help":
            self.open_screen("help", screen)

    def do_back(self) -> None:
        """Go back inside the screen (see `BaseScreen.step_back`), else to the previous screen; without a previous
        screen, to the Runs screen."""
        if isinstance(self.screen, BaseScreen) and self.screen.step_back():
            return
        if len(self.screen_stack) > 2:
            self.pop_screen()
        elif self._visited == [HOME]:
            self.show_message("this is the first screen; q leaves the console, training continues")
        else:
            run = self._left_run.pop(self._visited.pop(), None)
            others = self._left_run
            self.open_screen(self._visited[-1] if self._visited else HOME)
            self._left_run = others if self._visited != [HOME] else {}
            if run is not None and run.path.is_dir():
                self.open_screen("run", run)

    def do_suspend(self) -> None:
        """Stop the console and return to the shell that started it, as Ctrl-Z does; without effect where the shell
        cannot do that."""
        self.action_suspend_process()

    def do_leave(self) -> None:
        """Leave the console; if a run is being created, wait until it has started. Engine processes continue."""
        if creations(self.workers):
            self.show_message("the console closes when the run has started")
            self.run_worker(self._leave_after_creations())
        else:
            self.exit()

    async def _leave_after_creations(self) -> None:
        """Leave the console when every run that is being created has started or is in the queue. If one cannot be
        created, the console stays and shows why."""
        self._leaving = True
        self._leaving = all([await worker.wait() for worker in creations(self.workers)])
        if self._leaving:
            self.exit()

    def do_accept(self) -> None:
        """Do what Enter does in the field that is typed into: for a click in the footer."""
        self.simulate_key("enter")

    def do_discard(self) -> None:
        """Do what Esc does in the field that is typed into: for a click in the footer."""
        self.simulate_key("escape")

    def do_palette(self) -> None:
        """Open the command palette, which lists keys and screens by name."""
        self.action_command_palette()

    def action_command_palette(self) -> None:
        """Open the command palette; called by Textual's own key for it (Ctrl-P)."""
        if not CommandPalette.is_open(cast("App[object]", self)):
            names = "a screen, what a key does, a run, a recipe, a setting, an event"
            self.push_screen(CommandPalette(placeholder=names))

    def do_theme(self) -> None:
        """Switch to the next theme."""
        names = [theme.name for theme in THEMES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)]
        self.show_message(f"theme: {self.theme}")

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield the commands of the palette: every key of the present screen, and every screen."""
        if isinstance(screen, BaseScreen):
            for key in screen.key_rows():
                target = screen if key.screen != keys.EVERYWHERE else self
                presser = partial(target.action_press, key.action)
                name = key.label or key.action.replace("_", " ")
                yield SystemCommand(f"{name} ({keys.key_label(key.keys)})", key.help, presser)
        for row in SCREENS:
            if row.key:
                opener = partial(self.open_screen, row.name)
                yield SystemCommand(f"{row.title} ({row.key})", "open this screen", opener)


def _collect_garbage_from_now_on() -> None:
    """Switch the garbage collector on, and exclude all existing objects (modules, widgets) from collection, because
    they live as long as the console."""
    gc.freeze()
    gc.enable()


def run(flags: Flags) -> NoReturn:
    """Open the console, and exit after the user leaves it: with status 0, or 2 if the console cannot be opened."""
    try:
        _check(flags)
    except TunedeckError as error:
        sys.stderr.write("tunedeck: " + "\n  ".join(map(visible, error.render().splitlines())) + "\n")
        sys.exit(error.exit_code)
    _ignore_exported_size()
    if flags.runs:
        os.environ["TUNEDECK_RUNS"] = str(runs_folder(flags.runs))  # for a recipe's "run:NAME", here and in engines
    app = TunedeckApp(flags)
    watch_for_hangup()
    app.run()
    from engine.launch.other_processes import end_chats  # as slow to import as the next

    if ended := end_chats():
        chats = "the chat has" if ended == 1 else f"{ended} chats have"
        sys.stderr.write(f"tunedeck: {chats} ended to free memory; 7, then enter on it, continues the conversation\n")
    from tui.run.engine_processes import running_runs  # slow to import: not before the first paint

    for name in running_runs(app.runs_dir):
        sys.stderr.write(f"tunedeck: {visible(name)} continues; tunedeck shows it again\n")
    sys.exit(app.return_code)


def _ignore_exported_size() -> None:
    """Remove the environment variables COLUMNS and LINES: Textual would use them instead of the terminal's real size,
    even after a resize. They are not removed when the console is served to a browser (TEXTUAL_DRIVER is set), because
    there is no terminal to measure."""
    if "TEXTUAL_DRIVER" not in os.environ:
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)


def _check(flags: Flags) -> None:
    if unset := [text for text in flags.overrides if "=" not in text]:
        raise UsageError(
            f"--set {unset[0]}: no '='", expected="KEY=VALUE, such as train.learning_rate=1e-4", fix="tunedeck --help"
        )
    if flags.theme and flags.theme not in arguments.THEMES:
        raise UsageError(f"there is no theme {flags.theme!r}", expected=" or ".join(arguments.THEMES))
    if not arguments.on_a_terminal():
        raise UsageError(
            "the console needs a terminal, but input or output is a pipe or a file",
            fix="use a command instead, such as: tunedeck runs",
        )
