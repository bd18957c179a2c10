"""The console: a Textual application that shows runs and asks for things. It holds screens together and nothing else.

The engine knows nothing of it: they share the run directories, so leaving, killing or losing the console changes no
run. No module of the console imports torch or a heavy room of the engine, ever.

Try: `tunedeck`, `tunedeck --ascii`, `tunedeck --runs DIR`, `tunedeck -p demo -r demo`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import NoReturn, cast

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.command import CommandPalette
from textual.screen import Screen

from engine.errors import TunedeckError, UsageError
from engine.journal.directory import RunDirectory
from engine.journal.index import runs_folder
from engine.spec.files.text import visible
from tui import arguments, keys
from tui.arguments import Flags
from tui.run.engine_processes import Engines, still_running
from tui.screens.base import BaseScreen
from tui.screens.table import SCREENS, ScreenRow, screen_row
from tui.theme import THEMES
from tui.widgets.key_order import OneKeyAtATime

HOME = "runs"
"""The screen that every way back ends at."""

REAP_SECONDS = 1.0
"""Between looks at the engines this console has started."""


class TunedeckApp(OneKeyAtATime):
    """Opens screens by name, keeps the ones that are kept, and answers the keys that hold everywhere."""

    CSS_PATH = "console.tcss"
    TITLE = "Tunedeck"
    BINDINGS = [  # noqa: RUF012  # Textual's own declaration
        *keys.bindings(keys.EVERYWHERE),
        *(Binding(row.key, f"open_screen({row.name!r})", row.title, show=False) for row in SCREENS if row.key),
    ]
    COMMAND_PALETTE_BINDING = "ctrl+p"

    def __init__(self, flags: Flags) -> None:
        # With Textual's default, NO_COLOR leaves shades of grey; on the terminal's own colours it leaves none.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.flags = flags
        self._engines = Engines()
        self._visited: list[str] = []
        """Kept screens on the way back to the list of runs, the present one last."""
        self.runs_dir = runs_folder(flags.runs)
        self.ascii_only = arguments.ascii_only(flags, os.environ)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = arguments.theme_name(flags, os.environ)

    def on_mount(self) -> None:
        """Open the first screen."""
        self.set_class(self.ascii_only, "-ascii")
        self.set_interval(REAP_SECONDS, self._reap)
        settings = {"profile": self.flags.profile, "recipe": self.flags.recipe}
        if any(settings.values()):
            self.open_screen("launch", settings)
        else:
            self.open_screen(HOME)

    def open_screen(self, name: str, argument: object = None) -> None:
        """Show a screen of the table. A kept one replaces all that is open, the others go on top of it."""
        row = screen_row(name)
        screen = self._made(row)
        screen.receive(argument)
        if not row.kept:
            self.push_screen(screen)
            return
        earlier = self._visited if name != HOME else []
        self._visited = [*(visited for visited in earlier if visited != name), name]
        while len(self.screen_stack) > 2:
            self.pop_screen()
        if len(self.screen_stack) == 1:
            self.push_screen(screen)
        elif self.screen is not screen:
            self.switch_screen(screen)

    def _made(self, row: ScreenRow) -> BaseScreen:
        if row.kept and self.is_screen_installed(row.name):
            return cast(BaseScreen, self.get_screen(row.name))
        screen = getattr(import_module(row.module), row.class_name)()
        if row.kept:
            self.install_screen(screen, row.name)
        return cast(BaseScreen, screen)

    def action_press(self, action: str) -> None:
        """A key that holds everywhere: no screen refuses it, for these are the ways out."""
        getattr(self, f"do_{action}")()

    def start_engine(self, directory: RunDirectory, *, resume: bool) -> bool:
        """Start an engine on a run and say so; False, and why, when it cannot be."""
        try:
            warning = self._engines.start(directory, resume=resume)
        except TunedeckError as error:
            self.say(error.render().replace("\n", "; "), "bold $bad")
            return False
        except OSError as error:
            self.say(f"the engine cannot be started: {error.strerror or error}", "bold $bad")
            return False
        self.say(warning or f"the engine starts: {directory.name}", "$caution" if warning else "")
        return True

    def _reap(self) -> None:
        for sentence in self._engines.ended_badly():
            self.say(sentence, "bold $bad")

    def action_open_screen(self, name: str) -> None:
        """A digit was pressed."""
        self.open_screen(name)

    def action_help_quit(self) -> None:
        """Ctrl-C: not a way to end anything, but a sign that someone looks for one."""
        self.say("q leaves the console; training goes on")

    def say(self, text: str, style: str = "") -> None:
        """A message at the foot of the present screen."""
        if isinstance(self.screen, BaseScreen):
            self.screen.say(text, style)

    def do_help(self) -> None:
        """What the keys do on the present screen."""
        where = self.screen.where if isinstance(self.screen, BaseScreen) else ""
        if where != "help":
            self.open_screen("help", where)

    def do_back(self) -> None:
        """To the screen before, at last to the list of runs."""
        if len(self.screen_stack) > 2:
            self.pop_screen()
        elif self._visited == [HOME]:
            self.say("this is the first screen: q leaves the console, training goes on")
        else:
            self._visited.pop()
            self.open_screen(self._visited[-1] if self._visited else HOME)

    def do_leave(self) -> None:
        """Leave; nothing else ends."""
        self.exit()

    def do_palette(self) -> None:
        """Everything by name."""
        self.action_command_palette()

    def action_command_palette(self) -> None:
        """Textual's own key for it, too."""
        if not CommandPalette.is_open(cast("App[object]", self)):
            self.push_screen(CommandPalette(placeholder="a screen, or what a key does"))

    def do_theme(self) -> None:
        """The next theme."""
        names = [theme.name for theme in THEMES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)]
        self.say(f"theme: {self.theme}")

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette: every key of the present screen, and every screen."""
        if isinstance(screen, BaseScreen):
            for key in screen.key_rows():
                target = screen if key.where != keys.EVERYWHERE else self
                presser = partial(target.action_press, key.action)
                yield SystemCommand(f"{key.label or key.action} ({keys.shown(key.keys)})", key.help, presser)
        for row in SCREENS:
            if row.key:
                opener = partial(self.open_screen, row.name)
                yield SystemCommand(f"{row.title} ({row.key})", "open this screen", opener)


def run(flags: Flags) -> NoReturn:
    """Open the console, stay until it is left, and exit: 0, or 2 where it cannot be opened."""
    try:
        _check(flags)
    except TunedeckError as error:
        sys.stderr.write("tunedeck: " + "\n  ".join(map(visible, error.render().splitlines())) + "\n")
        sys.exit(error.exit_code)
    _measure_the_terminal_itself()
    app = TunedeckApp(flags)
    app.run()
    for name in still_running(app.runs_dir):
        sys.stderr.write(f"tunedeck: {visible(name)} goes on; tunedeck shows it again\n")
    sys.exit(app.return_code)


def _measure_the_terminal_itself() -> None:
    """Sizes that a shell or a test runner exported would be believed before the terminal's own, for good. Only when
    served to a browser is there no terminal to ask: then they are all there is."""
    if "TEXTUAL_DRIVER" not in os.environ:
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)


def _check(flags: Flags) -> None:
    if flags.theme and flags.theme not in arguments.THEMES:
        raise UsageError(f"no theme is called {flags.theme!r}", expected=" or ".join(arguments.THEMES))
    if not arguments.on_a_terminal():
        raise UsageError(
            "the console needs a terminal, and this is a pipe or a file",
            fix="use a command instead, such as: tunedeck runs",
        )
