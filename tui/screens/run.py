"""Run: one run, running or ended: its state, loss, figures, memory, events and log; keys to checkpoint, pause, stop.

The screen only reads the run directory and writes requests into it. The engine answers a request with an event, so
the screen never shows a state that the engine has not recorded. Below 80x24 one pane is shown at a time, and above it
always the run's state.

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
from engine.journal.stages import find_stage, stage_name
from engine.launch.process import force_stop
from tui.keys import bindings
from tui.plot.loss_plot import ZOOMS, LossPlot, LossPlotData, StepMarks
from tui.run.chain import chain_line, chain_of, current_stage, stage_beside
from tui.run.panels import event_lines, figure_lines, headline_lines, log_lines, memory_lines
from tui.run.ranks import rank_lines
from tui.run.reuse import launch_settings, resume_refusal
from tui.run.watch import FeedLine, LogTail, RunWatch
from tui.screens.base import BaseScreen
from tui.screens.confirm import ConfirmScreen
from tui.widgets.scrollback import Scrollback
from tui.widgets.text_lines import TextLines

POLL_SECONDS = 0.5
"""Interval at which the run is read."""

PAINT_SECONDS = 1.0
"""Least interval between repaints of the figures for new steps alone; what else happens is painted when it is read.
Each repaint is 1.5 KB over SSH."""

PLOT_SECONDS = 2.0
"""Least interval between repaints of the curve, 3 KB each."""

READ_SECONDS = 0.04
"""Longest time that one poll reads; a key press waits no longer."""

CATCH_UP_SECONDS = 0.02
"""The interval while a long journal is being read."""

ALL_PANES = ("loss", "figures", "ranks", "events", "log", "memory")

PANES = {"all": (), "regular": ("events", "memory", "log"), "one": ("loss", "figures", "events", "memory", "log")}
"""The panes that `tab` goes through, by the size of the screen; all others are always shown."""

TAB_LABELS = {"log": "engine log"}
"""What the tab of a pane says, where that is not the pane's name."""

RANKS_BEFORE = {"regular": "memory", "one": "events"}
"""The pane before which the ranks of a run over several devices are put."""

MAX_RANK_LINES = 9
"""Lines for the ranks on a screen that shows all panes: a heading and eight ranks."""


class RunScreen(BaseScreen):
    """The screen that shows one run."""

    screen_name = "run"
    BINDINGS = bindings("run")
    AUTO_FOCUS = ""

    def __init__(self) -> None:
        super().__init__()
        self._pane = {"all": "events", "regular": "events", "one": "loss"}
        self._rank_lines = 0
        """Lines that the ranks take; 0 for a run of one process."""
        self._feed_shown = 0
        """Number of events that were given to the events pane."""
        self._unpainted = False
        """Whether something was read that is not painted yet."""
        self._painted = ("", float("-inf"))
        """Status and time of the latest repaint of all but the curve."""
        self._plotted = (-1, float("-inf"))
        """Version of the data and time of the latest repaint of the curve."""

    def set_argument(self, argument: object) -> None:
        """Take the run directory to show."""
        assert isinstance(argument, RunDirectory)
        self._whole = self.run_watch = RunWatch(argument)
        self._log = LogTail(argument.log)

    @property
    def directory(self) -> RunDirectory:
        """The directory of the run, to which requests are sent. For a staged run this is the whole run's directory,
        even while the panes show one stage."""
        return self._whole.directory

    @property
    def status(self) -> str:
        """The run's status; empty until it has been read."""
        return self._whole.summary.status if self._whole.summary is not None else ""

    @property
    def looked_at(self) -> str:
        """Of a staged run, the name of the stage that the panes show."""
        watch = self.run_watch
        return current_stage(watch) if watch is self._whole else stage_name(watch.directory)

    def compose_body(self) -> ComposeResult:
        """Yield the panes."""
        yield TextLines(id="chain")
        yield TextLines(id="headline")
        yield TextLines(id="all-tabs", classes="tabs")
        with Horizontal(id="upper"):
            yield LossPlot(self.glyphs, self.console.ascii_only, id="loss")
            yield TextLines(id="figures", classes="pane")
        yield TextLines(id="word-tabs", classes="tabs")
        yield TextLines(id="ranks", classes="pane")
        with Horizontal(id="lower"):
            with Vertical(id="words"):
                yield Scrollback[FeedLine]("events", event_lines, empty="nothing has happened yet", id="events")
                yield Scrollback[str]("engine log", log_lines, empty="the engine has written nothing", id="log")
            yield TextLines(id="memory", classes="pane")

    def poll(self) -> float:
        """Read the run's journal and log, and repaint what they change."""
        self._unpainted = self._read() or self._unpainted
        happened = self.run_watch.feed_total != self._feed_shown or self.status != self._painted[0]
        if self._unpainted and (happened or time.monotonic() - self._painted[1] >= PAINT_SECONDS):
            self._paint()
        self._plot()
        if self._log.refresh():
            self.query_one("#log", Scrollback).replace(self._log.lines)
        return CATCH_UP_SECONDS if self.run_watch.unread_share > 0.01 else POLL_SECONDS

    def _read(self) -> bool:
        """Read what was added to the journal of the run, and of the stage that is looked at; returns whether anything
        changed."""
        changed = self._whole.read_more(seconds=READ_SECONDS)
        if self.run_watch is self._whole:
            return changed
        return self.run_watch.read_more(seconds=READ_SECONDS) or changed

    def _paint(self) -> None:
        self._paint_chain()
        watch, ascii_only = self.run_watch, self.console.ascii_only
        self._unpainted, self._painted = False, (self.status, time.monotonic())
        head = headline_lines(watch, self.size.width, self.glyphs, ascii_only=ascii_only)
        self.query_one("#headline", TextLines).show(head)
        numbers = figure_lines(watch, self.glyphs, ascii_only=ascii_only, with_ranks=self._room != "all")
        self.query_one("#figures", TextLines).show(numbers)
        self.set_class("expert_utilisation" in (watch.latest or {}), "-experts")
        pane = self.query_one("#memory", TextLines)
        heading = [Content.styled(" memory", "bold")] if self._room == "all" else []
        pane.show([*heading, *memory_lines(watch, pane.size.width, self.glyphs)])
        self._paint_ranks()
        new, self._feed_shown = watch.feed_total - self._feed_shown, watch.feed_total
        if new:
            self.query_one("#events", Scrollback).add(list(watch.feed)[-new:])
        self.refresh_title_and_footer()

    def _paint_chain(self) -> None:
        """Show the chain of a staged run above everything else."""
        chain, line = chain_of(self._whole), self.query_one("#chain", TextLines)
        line.display = bool(chain)
        if chain:
            ascii_only = self.console.ascii_only
            line.show([chain_line(chain, self.looked_at, self.size.width, ascii_only=ascii_only)])

    def _paint_ranks(self) -> None:
        pane = self.query_one("#ranks", TextLines)
        height = MAX_RANK_LINES if self._room == "all" else max(3, pane.size.height)
        lines = rank_lines(self.run_watch, self.size.width, height, self.glyphs)
        pane.show(lines)
        if len(lines) != self._rank_lines:
            self._rank_lines = len(lines)
            self._arrange()

    def _plot(self) -> None:
        """Repaint the loss curve if there is new data, at most once every PLOT_SECONDS."""
        drawn, at = self._plotted
        if self.run_watch.version != drawn and time.monotonic() - at >= PLOT_SECONDS:
            self._plotted = (self.run_watch.version, time.monotonic())
            self.query_one(LossPlot).set_data(self._plot_data())

    def _plot_data(self) -> LossPlotData:
        state = self.run_watch.state
        scores = [(e["step"], e["metrics"]["loss"]) for e in state.evals if e["metrics"].get("loss") is not None]
        marks = [
            StepMarks("checkpoint", "■", "$muted", self.run_watch.checkpoint_steps),
            StepMarks("oom", "▲", "bold $bad", [event["step"] for event in state.backoffs]),
        ]
        return LossPlotData(self.run_watch.curves.loss, scores, marks, note="no step yet")

    def title_detail(self) -> str:
        """The run's name; of a staged run, also the name of a stage that is looked at instead of the present one."""
        whole = self.run_watch is self._whole
        return clean(self.directory.name if whole else f"{self.directory.name}/{self.looked_at}")

    def on_resize(self, event: events.Resize) -> None:
        """Show the panes that fit the new size."""
        super().on_resize(event)
        self._arrange()
        self.call_after_refresh(self._paint)

    @property
    def _room(self) -> str:
        if self.has_class("-one-pane"):
            return "one"
        return "all" if self.has_class("-roomy") else "regular"

    def _panes(self) -> tuple[str, ...]:
        """The panes through which the key `tab` cycles at the present size."""
        names = PANES[self._room]
        if not self._rank_lines or not names:
            return names
        at = names.index(RANKS_BEFORE[self._room])
        return (*names[:at], "ranks", *names[at:])

    def _arrange(self) -> None:
        """Show the panes for which there is room, and hide the others."""
        room, switched = self._room, self._panes()
        chosen = self._pane[room]
        for name in ALL_PANES:
            self.query_one(f"#{name}").display = name not in switched or name == chosen
        table = self.query_one("#ranks", TextLines)
        table.display = table.display and bool(self._rank_lines)
        table.styles.height = self._rank_lines if room == "all" else "1fr"
        self.set_class(bool(self._rank_lines), "-ranks")
        for box in ("words", "upper", "lower"):
            found = self.query_one(f"#{box}")
            found.display = any(child.display for child in found.children)
        for pane in self.query(Scrollback):
            pane.headed = not switched
        for name, where in (("#all-tabs", "one"), ("#word-tabs", "regular")):
            tabs = self.query_one(name, TextLines)
            tabs.display = room == where
            tabs.show([_tabs(switched, chosen)])

    def disabled_reason(self, action: str) -> str | None:
        """Why a key has no effect in the run's present state; None if the key has an effect."""
        status = self.status
        summary = self._whole.summary
        if action in ("checkpoint", "pause", "stop") and status != "running":
            return f"the run is {status or 'not read yet'}: there is no engine to ask"
        if action in ("checkpoint", "pause") and summary is not None and summary.stopping:
            return "it is stopping already"
        if action == "resume":
            return resume_refusal(self.directory, status)
        if action in ("next_stage", "previous_stage"):
            return self._other_stage(1 if action == "next_stage" else -1)[1]
        if action == "report" and not (self.run_watch.state.backoffs or self.run_watch.state.oom_reports):
            return "this run never ran out of memory"
        if action == "next_pane" and not PANES[self._room]:
            return "all panes are shown"
        return None

    def _other_stage(self, by: int) -> tuple[str, str | None]:
        """The stage `by` places after the one looked at, and why it cannot be looked at; None if it can."""
        name, refusal = stage_beside(chain_of(self._whole), self.looked_at, by)
        if refusal is None and find_stage(self.directory, name) is None:
            refusal = f"stage {name} has not begun"
        return name, refusal

    def do_next_stage(self) -> None:
        """Look into the next stage."""
        self._look_into(self._other_stage(1)[0])

    def do_previous_stage(self) -> None:
        """Look into the stage before."""
        self._look_into(self._other_stage(-1)[0])

    def _look_into(self, name: str) -> None:
        """Show a stage in all panes. At the stage that runs, or ran last, the panes follow the run as a whole again."""
        stage = find_stage(self.directory, name)
        if stage is None:
            return
        follows = name == current_stage(self._whole)
        self.run_watch = self._whole if follows else RunWatch(stage)
        self._log = LogTail(self.directory.log if follows else stage.log)
        self._log.refresh()
        self.query_one("#log", Scrollback).replace(self._log.lines)
        self.query_one("#events", Scrollback).replace(list(self.run_watch.feed))
        self._feed_shown, self._plotted = self.run_watch.feed_total, (-1, float("-inf"))
        self._refresh_now()
        self._plot()

    def do_checkpoint(self) -> None:
        """Request a checkpoint."""
        self._ask_engine("checkpoint", "asked for a checkpoint after this step")

    def do_pause(self) -> None:
        """Request a pause."""
        self._ask_engine("pause", "asked to pause: a checkpoint, then the device is free")

    def do_stop(self) -> None:
        """Ask for a confirmation, then request a stop; if a stop was requested before, kill the engine instead."""
        if self._whole.summary is not None and self._whole.summary.stopping:
            self.show_message("the engine is being ended by force")
            self.run_worker(self._force, thread=True, exit_on_error=False)
            return
        question = "Stop this run after the present step, with a checkpoint?"
        self.app.push_screen(ConfirmScreen(question, "stop it"), self._stop_if)

    def _stop_if(self, yes: bool | None) -> None:
        if yes:
            self._ask_engine("stop", "asked to stop after this step; s again stops it at once, without a checkpoint")

    def _ask_engine(self, name: str, message: str) -> None:
        """Write the request `name` into the run directory, and show `message`."""
        try:
            control.send_request(self.directory, name)
        except OSError as error:
            self.show_message(f"the request cannot be written: {error.strerror or error}", "bold $bad")
        else:
            self.show_message(message)
        self._refresh_now()

    def _force(self) -> None:
        """Kill the engine. This runs in a thread, because a GPU driver may delay the end of a killed process for
        seconds."""
        try:
            force_stop(self.directory)
        except (TunedeckError, OSError) as error:
            found = error.found if isinstance(error, TunedeckError) else str(error)
            self.app.call_from_thread(self.show_message, found, "bold $bad")

    def do_resume(self) -> None:
        """Start an engine process that resumes the run."""
        self.console.start_engine(self.directory, resume=True)
        self._refresh_now()

    def do_report(self) -> None:
        """Open the screen with the run's out-of-memory reports."""
        self.console.open_screen("oom", self.run_watch.directory)

    def do_clone(self) -> None:
        """Open Launch with the settings of this run."""
        self.console.open_screen("launch", launch_settings(self.directory))

    def do_log_axis(self) -> None:
        """Switch the y axis between logarithmic and linear."""
        plot = self.query_one(LossPlot)
        plot.set_options(replace(plot.options, log=not plot.options.log))

    def do_smooth(self) -> None:
        """Switch between the smoothed and the plain curve."""
        plot = self.query_one(LossPlot)
        plot.set_options(replace(plot.options, smooth=not plot.options.smooth))

    def do_zoom(self) -> None:
        """Switch to the next part of the run: all of it, its last half, its last tenth."""
        plot, names = self.query_one(LossPlot), list(ZOOMS)
        plot.set_options(replace(plot.options, zoom=names[(names.index(plot.options.zoom) + 1) % len(names)]))

    def do_next_pane(self) -> None:
        """Show the next pane."""
        room, names = self._room, self._panes()
        self._pane[room] = names[(names.index(self._pane[room]) + 1) % len(names)]
        self._arrange()
        self.call_after_refresh(self._paint)

    def do_older(self) -> None:
        """Scroll up by a line, in the log if it is shown, else in the events."""
        self._scroll(1)

    def do_newer(self) -> None:
        """Scroll down by a line, in the log if it is shown, else in the events."""
        self._scroll(-1)

    def do_page_older(self) -> None:
        """Scroll up by a page, in the log if it is shown, else in the events."""
        self._scroll(self._scrolled.page)

    def do_page_newer(self) -> None:
        """Scroll down by a page, in the log if it is shown, else in the events."""
        self._scroll(-self._scrolled.page)

    def do_newest(self) -> None:
        """Scroll to the newest line, and show new lines as they arrive."""
        self._scroll(-(10**9))

    @property
    def _scrolled(self) -> Scrollback[Any]:
        return self.query_one("#log" if self._pane[self._room] == "log" else "#events", Scrollback)

    def _scroll(self, lines: int) -> None:
        self._scrolled.scroll_lines(lines)

    def _refresh_now(self) -> None:
        self._read()
        self._paint()


def _tabs(names: Sequence[str], chosen: str) -> Content:
    parts = [(f" {TAB_LABELS.get(name, name)} ", "bold reverse" if name == chosen else "$muted") for name in names]
    return Content.assemble(" ", *parts, ("  tab: next", "$muted"))
