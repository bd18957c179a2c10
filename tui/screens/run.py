"""Run: one run as it goes, or as it went: state, loss, figures, memory, events, log; and the keys that ask for things.

The screen asks and watches; it decides nothing. A request is a file that the engine answers with an event, so what the
screen shows is what the engine said. Below 80x24 one pane at a time, with the state always in sight.

Try: `tunedeck`, then Enter on a run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content

from engine.errors import TunedeckError
from engine.journal import control
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.launch.process import force_stop
from tui.keys import bindings
from tui.plot.loss_plot import ZOOMS, LossPlot, Mark, Picture
from tui.run.clone import recipe_of
from tui.run.panels import feed_lines, figures, headline, log_lines, memory
from tui.run.ranks import ranks
from tui.run.reuse import why_not_resume
from tui.run.watch import FeedLine, LogTail, RunWatch
from tui.screens.base import BaseScreen
from tui.screens.confirm import Question
from tui.widgets.scrollback import Scrollback
from tui.widgets.text_lines import Lines

LOOK_SECONDS = 0.5
"""Two redraws a second at most: more makes an SSH line crawl."""

PLOT_SECONDS = 1.0
"""Between two redraws of the curve."""

SLICE_SECONDS = 0.04
"""How long one look may read; a key press waits no longer."""

CATCH_UP_SECONDS = 0.02
"""Between looks while a long history is being read."""

ALL_PANES = ("loss", "figures", "ranks", "events", "log", "memory")

PANES = {"all": (), "regular": ("events", "memory", "log"), "one": ("loss", "figures", "events", "memory", "log")}
"""Which panes `tab` goes through, by how much room there is; the others are always in sight."""

RANKS_BEFORE = {"regular": "memory", "one": "events"}
"""Where the ranks of a run of several stand among them."""

MOST_RANK_LINES = 9
"""Of a screen that shows everything: eight ranks and their heading."""


class RunScreen(BaseScreen):
    """One run."""

    where = "run"
    BINDINGS = bindings("run")
    AUTO_FOCUS = ""

    def __init__(self) -> None:
        super().__init__()
        self._pane = {"all": "events", "regular": "events", "one": "loss"}
        self._rank_lines = 0
        """Lines that the ranks take; 0 for a run of one process."""
        self._fed = 0
        self._plotted = (-1, float("-inf"))

    def receive(self, argument: object) -> None:
        """The run directory to show."""
        assert isinstance(argument, RunDirectory)
        self.watch_of = RunWatch(argument)
        self._log = LogTail(argument.log)

    @property
    def directory(self) -> RunDirectory:
        """Of the run that is shown."""
        return self.watch_of.directory

    @property
    def status(self) -> str:
        """The run's state; empty while it is not known."""
        return self.watch_of.summary.status if self.watch_of.summary is not None else ""

    def body(self) -> ComposeResult:
        """The panes."""
        yield Lines(id="headline")
        yield Lines(id="all-tabs", classes="tabs")
        with Horizontal(id="upper"):
            yield LossPlot(self.draw, self.console.ascii_only, id="loss")
            yield Lines(id="figures", classes="pane")
        yield Lines(id="word-tabs", classes="tabs")
        yield Lines(id="ranks", classes="pane")
        with Horizontal(id="lower"):
            with Vertical(id="words"):
                yield Scrollback[FeedLine]("events", feed_lines, empty="nothing has happened yet", id="events")
                yield Scrollback[str]("log", log_lines, empty="the engine has written nothing to engine.log", id="log")
            yield Lines(id="memory", classes="pane")

    def on_mount(self) -> None:
        """Begin to look."""
        self._look()

    def _look(self) -> None:
        if self.is_current:
            if self.watch_of.look(seconds=SLICE_SECONDS):
                self._paint()
            self._plot()
            if self._log.look():
                self.query_one("#log", Scrollback).replace(self._log.lines)
        self.set_timer(CATCH_UP_SECONDS if self.watch_of.behind > 0.01 else LOOK_SECONDS, self._look)

    def _paint(self) -> None:
        watch, ascii_only = self.watch_of, self.console.ascii_only
        self.query_one("#headline", Lines).show(headline(watch, self.size.width, self.draw, ascii_only=ascii_only))
        numbers = figures(watch, self.draw, ascii_only=ascii_only, with_ranks=self._room != "all")
        self.query_one("#figures", Lines).show(numbers)
        pane = self.query_one("#memory", Lines)
        heading = [Content.styled(" memory", "bold")] if self._room == "all" else []
        pane.show([*heading, *memory(watch, pane.size.width, self.draw)])
        self._paint_ranks()
        new, self._fed = watch.fed - self._fed, watch.fed
        if new:
            self.query_one("#events", Scrollback).add(list(watch.feed)[-new:])
        self.refresh_bars()

    def _paint_ranks(self) -> None:
        pane = self.query_one("#ranks", Lines)
        height = MOST_RANK_LINES if self._room == "all" else max(3, pane.size.height)
        lines = ranks(self.watch_of, self.size.width, height, self.draw)
        pane.show(lines)
        if len(lines) != self._rank_lines:
            self._rank_lines = len(lines)
            self._arrange()

    def _plot(self) -> None:
        """Redraw the curve when data came, at most once a second."""
        drawn, at = self._plotted
        if self.watch_of.version != drawn and time.monotonic() - at >= PLOT_SECONDS:
            self._plotted = (self.watch_of.version, time.monotonic())
            self.query_one(LossPlot).put(self._picture())

    def _picture(self) -> Picture:
        state = self.watch_of.state
        scores = [(e["step"], e["metrics"]["loss"]) for e in state.evals if e["metrics"].get("loss") is not None]
        marks = [
            Mark("checkpoint", "■", "$muted", self.watch_of.saved),
            Mark("oom", "▲", "bold $bad", [event["step"] for event in state.backoffs]),
        ]
        return Picture(self.watch_of.curves.loss, scores, marks, note="no step yet")

    def about(self) -> str:
        """The run's name."""
        return clean(self.directory.name)

    def on_resize(self, event: events.Resize) -> None:
        """Other panes fit."""
        super().on_resize(event)
        self._arrange()
        self.call_after_refresh(self._paint)

    @property
    def _room(self) -> str:
        if self.has_class("-one-pane"):
            return "one"
        return "all" if self.has_class("-roomy") else "regular"

    def _panes(self) -> tuple[str, ...]:
        """Which panes `tab` goes through now."""
        names = PANES[self._room]
        if not self._rank_lines or not names:
            return names
        at = names.index(RANKS_BEFORE[self._room])
        return (*names[:at], "ranks", *names[at:])

    def _arrange(self) -> None:
        """Show the panes there is room for."""
        room, switched = self._room, self._panes()
        chosen = self._pane[room]
        for name in ALL_PANES:
            self.query_one(f"#{name}").display = name not in switched or name == chosen
        table = self.query_one("#ranks", Lines)
        table.display = table.display and bool(self._rank_lines)
        table.styles.height = self._rank_lines if room == "all" else "1fr"
        self.set_class(bool(self._rank_lines), "-ranks")
        for box in ("words", "upper", "lower"):
            found = self.query_one(f"#{box}")
            found.display = any(child.display for child in found.children)
        for pane in self.query(Scrollback):
            pane.headed = not switched
        for name, where in (("#all-tabs", "one"), ("#word-tabs", "regular")):
            tabs = self.query_one(name, Lines)
            tabs.display = room == where
            tabs.show([_tabs(switched, chosen)])

    def why_not(self, action: str) -> str | None:
        """What the run's state forbids."""
        status = self.status
        summary = self.watch_of.summary
        if action in ("checkpoint", "pause", "stop") and status != "running":
            return f"the run is {status or 'not read yet'}: there is no engine to ask"
        if action in ("checkpoint", "pause") and summary is not None and summary.stopping:
            return "it is stopping already"
        if action == "resume":
            return why_not_resume(self.directory, status)
        if action == "report" and not (self.watch_of.state.backoffs or self.watch_of.state.oom_reports):
            return "memory never ran out in this run"
        if action == "next_pane" and not PANES[self._room]:
            return "every pane is in sight"
        return None

    def do_checkpoint(self) -> None:
        """Ask for a checkpoint."""
        self._ask_engine("checkpoint", "asked for a checkpoint after this step")

    def do_pause(self) -> None:
        """Ask for a pause."""
        self._ask_engine("pause", "asked to pause: a checkpoint, then the device is free")

    def do_stop(self) -> None:
        """Ask whether to stop; where a stop was asked for already, end it by force."""
        if self.watch_of.summary is not None and self.watch_of.summary.stopping:
            self.say("stopping it by force")
            self.run_worker(self._force, thread=True, exit_on_error=False)
            return
        question = "Stop this run after the present step, with a checkpoint?"
        self.app.push_screen(Question(question, "stop it"), self._stop_if)

    def _stop_if(self, yes: bool | None) -> None:
        if yes:
            self._ask_engine("stop", "asked to stop after this step; s again stops it at once, without a checkpoint")

    def _ask_engine(self, name: str, promise: str) -> None:
        try:
            control.send_request(self.directory, name)
        except OSError as error:
            self.say(f"the request cannot be written: {error.strerror or error}", "bold $bad")
        else:
            self.say(promise)
        self._look_now()

    def _force(self) -> None:
        """In a thread: a driver may hold a killed process for seconds."""
        try:
            force_stop(self.directory)
        except (TunedeckError, OSError) as error:
            found = error.found if isinstance(error, TunedeckError) else str(error)
            self.app.call_from_thread(self.say, found, "bold $bad")

    def do_resume(self) -> None:
        """Start an engine that goes on with the run."""
        self.console.start_engine(self.directory, resume=True)
        self._look_now()

    def do_report(self) -> None:
        """What memory was made of when it ran out."""
        self.console.open_screen("oom", self.directory)

    def do_clone(self) -> None:
        """The same again, to be changed before it starts."""
        self.console.open_screen("launch", recipe_of(self.directory))

    def do_log_axis(self) -> None:
        """Loss on a log axis, or not."""
        plot = self.query_one(LossPlot)
        plot.look_at(replace(plot.look, log=not plot.look.log))

    def do_smooth(self) -> None:
        """Smoothed, or as it is."""
        plot = self.query_one(LossPlot)
        plot.look_at(replace(plot.look, smooth=not plot.look.smooth))

    def do_zoom(self) -> None:
        """The whole run, its last half, its last tenth."""
        plot, names = self.query_one(LossPlot), list(ZOOMS)
        plot.look_at(replace(plot.look, zoom=names[(names.index(plot.look.zoom) + 1) % len(names)]))

    def do_next_pane(self) -> None:
        """Show the next pane."""
        room, names = self._room, self._panes()
        self._pane[room] = names[(names.index(self._pane[room]) + 1) % len(names)]
        self._arrange()
        self.call_after_refresh(self._paint)

    def do_older(self) -> None:
        """Back through events, or the log where that is what is shown."""
        self._scroll(1)

    def do_newer(self) -> None:
        """Forth again."""
        self._scroll(-1)

    def do_page_older(self) -> None:
        """A page back."""
        self._scroll(self._scrolled.page)

    def do_page_newer(self) -> None:
        """A page forth."""
        self._scroll(-self._scrolled.page)

    def do_newest(self) -> None:
        """To the end, and follow it."""
        self._scroll(-(10**9))

    @property
    def _scrolled(self) -> Scrollback[Any]:
        return self.query_one("#log" if self._pane[self._room] == "log" else "#events", Scrollback)

    def _scroll(self, lines: int) -> None:
        self._scrolled.scroll_lines(lines)

    def _look_now(self) -> None:
        if self.watch_of.look(seconds=SLICE_SECONDS):
            self._paint()


def _tabs(names: Sequence[str], chosen: str) -> Content:
    parts = [(f" {name} ", "bold reverse" if name == chosen else "$muted") for name in names]
    return Content.assemble(" ", *parts, ("  tab: next", "$muted"))
