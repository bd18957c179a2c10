"""What the command palette finds beside screens and keys: runs, recipes, profiles, settings and, on the Run screen, the
run's events.

Try: `ctrl+p`, then some letters of a run's name
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, cast

from textual.command import Hit, Hits, Provider

from engine.config.files.find import list_spec_files
from engine.config.files.text import visible
from engine.journal.event_text import clean
from engine.journal.index import list_runs
from tui.console import Console
from tui.launch.fields import FIELDS, SOURCES
from tui.run.listing import short_name
from tui.screens.launch import LaunchScreen
from tui.screens.run import RunScreen

MOST_RUNS = 500
"""Newest runs that are found."""

MOST_EVENTS = 300
"""Newest events that are found."""


class Thing(NamedTuple):
    """One line of the palette: what is searched, what is said about it, and what Enter does."""

    name: str
    help: str
    open: Callable[[], None]


class ThingsProvider(Provider):
    """Gives the palette the runs, files, settings and events that match what is typed."""

    async def startup(self) -> None:
        """Collect everything once, when the palette is opened."""
        self._things = [*things(cast(Console, self.app)), *_events(self.screen)]

    async def search(self, query: str) -> Hits:
        """Yield what matches `query`, letters in the order in which they are typed."""
        matcher = self.matcher(query)
        for thing in self._things:
            score = matcher.match(thing.name)
            if score > 0:
                yield Hit(score, matcher.highlight(thing.name), thing.open, help=thing.help)


def things(console: Console) -> Iterator[Thing]:
    """Yield the runs of the console's folder, newest first, recipes, profiles, and the settings of Launch."""
    try:
        runs = list_runs(console.runs_dir)[:MOST_RUNS]
    except OSError:
        runs = []  # the list of runs says why
    for run in runs:
        name = f"run {clean(short_name(run))}"
        yield Thing(name, clean(run.name), partial(console.open_screen, "run", run))
    for located in list_spec_files("recipe"):
        opened = partial(console.open_screen, "launch", {"recipe": located.name})
        yield Thing(f"recipe {visible(located.name)}", f"{located.origin}: open Launch with it", opened)
    for located in list_spec_files("profile"):
        opened = partial(console.open_screen, "launch", {"profile": located.name})
        yield Thing(f"profile {visible(located.name)}", f"{located.origin}: open Launch with it", opened)
    for field in FIELDS:
        if field.key != SOURCES:
            yield Thing(f"setting {field.label}", f"{field.key}: on Launch", partial(_go_to, console, field.key))


def _go_to(console: Console, key: str) -> None:
    """Open Launch with the cursor on a setting."""
    console.open_screen("launch")
    screen = console.front_screen
    if isinstance(screen, LaunchScreen):
        screen.call_after_refresh(screen.go_to_setting, key)


def _events(screen: object) -> Iterator[Thing]:
    """Yield the events of the run that is shown, newest first, where the screen is that of a run."""
    if isinstance(screen, RunScreen):
        for line in list(screen.run_watch.feed)[: -MOST_EVENTS - 1 : -1]:
            yield Thing(f"event {line.text}", f"{line.kind}, {line.time}", partial(screen.show_event, line.text))
