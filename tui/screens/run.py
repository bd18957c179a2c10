"""Run: one run, running or ended: its state, loss, figures, memory, events and log; keys to checkpoint, pause, stop.

The screen only reads the run directory and writes requests into it. The engine answers a request with an event, so
the screen never shows a state that the engine has not recorded.

Try: `tunedeck`, then Enter on a run.
"""

from __future__ import annotations

import time
from typing import Any

from textual import events
from textual.app import ComposeResult

from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean, format_number
from engine.journal.stages import find_stage, stage_name
from tui.keys import bindings
from tui.plot.loss_plot import LossPlot, PlotOptions
from tui.run.chain import chain_line, chain_of, current_stage, stage_beside
from tui.run.log_tail import LogTail
from tui.run.memory import memory_in_force
from tui.run.panels import headline_lines
from tui.run.panes import RunPanes
from tui.run.reuse import launch_settings, resume_refusal
from tui.run.scores import has_scores, sample_history, score_lines
from tui.run.scores_pane import ScoresPane
from tui.run.watch import RunWatch
from tui.screens.engine_keys import EngineKeys
from tui.screens.model_keys import MODEL_ACTIONS, ModelKeys
from tui.screens.plot_keys import PlotKeys
from tui.screens.run_keys import RUN_ACTIONS, RunKeys
from tui.screens.scroll_keys import SCROLL_ACTIONS, ScrollKeys
from tui.widgets.input_prompt import InputPrompt
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
"""Most seconds for which one poll reads; a key press waits no longer than this."""

CATCH_UP_SECONDS = 0.02
"""The interval while a long journal is being read."""

PANE_ACTIONS = (
    "next_pane", "previous_pane", "enlarge", "filter", "next_metric", "previous_metric", "log_axis", "smooth",
    "zoom_in", "zoom_out", "grid", "cursor_left", "cursor_right", "cursor_far_left", "cursor_far_right", "export_plot",
    "copy", "next_kind",
)  # fmt: skip
"""Actions on panes, which have no effect while the scores are shown instead."""

PLOT_ACTIONS = ("cursor_left", "cursor_right", "cursor_far_left", "cursor_far_right", "export_plot")
"""Actions on the plot of one metric, which have no effect while the grid of all is shown instead."""


class RunScreen(PlotKeys, ScrollKeys, EngineKeys, ModelKeys, RunKeys):
    """The screen that shows one run while it trains or after it has ended, and sends it requests."""

    screen_name = "run"
    BINDINGS = bindings("run")
    AUTO_FOCUS = ""

    def __init__(self) -> None:
        super().__init__()
        self._unpainted = False
        self._painted = ("", float("-inf"))
        """Status and time of the latest repaint of all but the curve."""
        self._plotted = ((-1, -1), float("-inf"))
        """Version of the data and time of the latest repaint of the curve."""
        self._samples_back = 0
        """Evaluations after the one whose answers the scores show."""
        self._metric_unread = False

    def set_argument(self, argument: object) -> None:
        """Take the run directory to show."""
        assert isinstance(argument, RunDirectory)
        self._whole = self.run_watch = RunWatch(argument)
        self._log = LogTail(argument.log)

    @property
    def directory(self) -> RunDirectory:
        """To which requests are sent: of a staged run the whole one, even while the panes show one stage."""
        return self._whole.directory

    @property
    def chosen_runs(self) -> list[RunDirectory]:
        """The run, or of a staged run the stage that the panes show."""
        return [self.run_watch.directory]

    @property
    def status(self) -> str:
        """Empty until it has been read."""
        return self._whole.summary.status if self._whole.summary is not None else ""

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested and the engine has not ended yet."""
        return self._whole.summary is not None and self._whole.summary.stopping

    @property
    def looked_at(self) -> str:
        """Of a staged run, the name of the stage that the panes show."""
        watch = self.run_watch
        return current_stage(watch) if watch is self._whole else stage_name(watch.directory)

    def compose_body(self) -> ComposeResult:
        """Yield the chain of stages, the run's state, and the panes."""
        yield TextLines(id="chain")
        yield TextLines(id="headline")
        yield RunPanes(self.glyphs, self.console.ascii_only)
        yield ScoresPane(id="scores")
        yield InputPrompt()

    @property
    def acted_on(self) -> RunDirectory:
        """The run that is shown; of a staged run the whole one."""
        return self.directory

    @property
    def scores(self) -> ScoresPane:
        return self.query_one(ScoresPane)

    @property
    def scrolled(self) -> Scrollback[Any] | ScoresPane:
        """The pane on which scroll keys act: the scores while they are open, else log or events."""
        return self.scores if self.scores.is_open else self.panes.scrolled

    @property
    def panes(self) -> RunPanes:
        return self.query_one(RunPanes)

    def poll(self) -> float:
        """Read the run's journal and log, and repaint what has changed; returns the seconds until the next reading."""
        self._unpainted = self._read() or self._unpainted
        happened = self.panes.has_new_events(self.run_watch) or self.status != self._painted[0]
        if self._unpainted and (happened or time.monotonic() - self._painted[1] >= PAINT_SECONDS):
            self._paint()
        self._plot()
        self.tell_scorings()
        if self._log.refresh():
            self.panes.add_log(self._log)
        catches_up = self.run_watch.unread_share > 0.01 or self._metric_unread
        return CATCH_UP_SECONDS if catches_up else POLL_SECONDS

    def _read(self) -> bool:
        """Read the journals of the run and of the stage that is looked at; returns whether anything changed."""
        changed = self._whole.read_more(seconds=READ_SECONDS)
        if self.run_watch is self._whole:
            return changed
        return self.run_watch.read_more(seconds=READ_SECONDS) or changed

    def _paint(self) -> None:
        self._paint_chain()
        self._unpainted, self._painted = False, (self.status, time.monotonic())
        ascii_only = self.console.ascii_only
        head = headline_lines(self.run_watch, self.size.width, self.glyphs, ascii_only=ascii_only)
        self.query_one("#headline", TextLines).show(head)
        self.panes.paint(self.run_watch)
        if self.scores.is_open:
            self.scores.set_lines(score_lines(self.run_watch, self.size.width, self.glyphs, self._samples_back))
        self.refresh_title_and_footer()

    def _paint_chain(self) -> None:
        chain, line = chain_of(self._whole), self.query_one("#chain", TextLines)
        line.display = bool(chain)
        if chain:
            ascii_only = self.console.ascii_only
            line.show([chain_line(chain, self.looked_at, self.size.width, ascii_only=ascii_only)])

    def _plot(self) -> None:
        drawn, at = self._plotted
        self._metric_unread = self.panes.read_metric(self.run_watch, seconds=READ_SECONDS)
        version = (self.run_watch.version, self.panes.metric_version)
        if version != drawn and time.monotonic() - at >= PLOT_SECONDS:
            self._plotted = (version, time.monotonic())
            self.panes.plot_run(self.run_watch)

    def title_detail(self) -> str:
        """The run's name; of a staged run also the stage that the panes show, unless that is the present one."""
        whole = self.run_watch is self._whole
        return clean(self.directory.name if whole else f"{self.directory.name}/{self.looked_at}")

    def terminal_title(self) -> str:
        """The run's state, loss and name."""
        latest = self.run_watch.latest or {}
        loss = format_number(latest["loss"]) if isinstance(latest.get("loss"), int | float) else ""
        return " ".join(part for part in (self.status, loss, clean(self.directory.name)) if part)

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self._arrange()

    def _arrange(self) -> None:
        one = self.has_class("-one-pane")
        self.panes.show_panes("one" if one else "all" if self.has_class("-roomy") else "regular")
        self.call_after_refresh(self._paint)

    def disabled_reason(self, action: str) -> str | None:
        """Why a key has no effect in the run's present state; None if the key has an effect."""
        status = self.status
        if action in ("checkpoint", "pause", "stop") and status != "running":
            return f"the run is {status or 'not read yet'}: no engine is running"
        if action in ("checkpoint", "pause") and self.is_stopping:
            return "it is already stopping"
        if action in RUN_ACTIONS:
            return self.run_action_refusal(action, status)
        if action == "resume":
            return resume_refusal(self.directory, status)
        if action in MODEL_ACTIONS:
            return self.no_model_reason()
        if action == "scores" and not has_scores(self.run_watch):
            return f"this run has no scores yet: tunedeck eval {self.directory.name}"
        if self.scores.is_open and action in PANE_ACTIONS:
            return "the scores are open; b closes them"
        if action in PLOT_ACTIONS and self.panes.shows_grid:
            return "all metrics are shown; M shows one"
        if action in SCROLL_ACTIONS and not self.scores.is_open and not self.panes.scrolls:
            return "this pane does not scroll; tab goes to the next"
        if action in ("next_stage", "previous_stage") and self.scores.is_open:
            return self._no_other_answers(1 if action == "previous_stage" else -1)
        if action in ("next_stage", "previous_stage"):
            return self._other_stage(1 if action == "next_stage" else -1)[1]
        if action == "report" and not (self.run_watch.state.backoffs or self.run_watch.state.oom_reports):
            return "this run has had no out-of-memory errors"
        return None

    def _other_stage(self, by: int) -> tuple[str, str | None]:
        """(name of the stage `by` places after the one that the panes show, why it cannot be shown or None)."""
        name, refusal = stage_beside(chain_of(self._whole), self.looked_at, by)
        if refusal is None and find_stage(self.directory, name) is None:
            refusal = f"stage {name} has not started"
        return name, refusal

    def _no_other_answers(self, by: int) -> str | None:
        is_there = 0 <= self._samples_back + by < len(sample_history(self.run_watch))
        return None if is_there else f"there are no {'earlier' if by > 0 else 'later'} answers"

    def do_next_stage(self) -> None:
        """Show the next stage of a staged run; while the scores are open, the next evaluation's answers."""
        if self.scores.is_open:
            self._samples_back -= 1
            self._paint()
            return
        self._look_into(self._other_stage(1)[0])

    def do_previous_stage(self) -> None:
        """Show the previous stage of a staged run; while the scores are open, the answers of the one before."""
        if self.scores.is_open:
            self._samples_back += 1
            self._paint()
            return
        self._look_into(self._other_stage(-1)[0])

    def _look_into(self, name: str) -> None:
        """For the stage that runs, or ran last, the panes show the whole run again, and follow it to the next."""
        stage = find_stage(self.directory, name)
        if stage is None:
            return
        follows = name == current_stage(self._whole)
        self.run_watch = self._whole if follows else RunWatch(stage)
        self._log = LogTail(self.directory.log if follows else stage.log)
        self.panes.change_run(self.run_watch)
        self._log.refresh()
        self.panes.add_log(self._log)
        self._plotted = ((-1, -1), float("-inf"))
        self.refresh_now()
        self._plot()

    def do_report(self) -> None:
        """Open the screen with the run's out-of-memory reports."""
        self.console.open_screen("oom", self.run_watch.directory)

    def do_memory(self) -> None:
        """Open the screen with the predicted memory by phase."""
        planned = memory_in_force(self.run_watch.directory, self.looked_at, self.run_watch.summary)
        if planned is None:
            self.show_message("no prediction by phase for this run", "$caution")
        else:
            self.console.open_screen("memory", planned)

    def do_scores(self) -> None:
        """Show scores and generated answers in place of the panes, or the panes again."""
        self.scores.toggle()
        self._samples_back = 0
        self.panes.display = not self.scores.is_open
        self.call_after_refresh(self._paint)

    def do_clone(self) -> None:
        """Open Launch with the settings of this run."""
        self.console.open_screen("launch", launch_settings(self.directory))

    def do_next_metric(self) -> None:
        """Plot the next metric of METRICS; after the last comes the first."""
        self._change_metric(1)

    def do_previous_metric(self) -> None:
        """Plot the previous metric of METRICS; before the first comes the last."""
        self._change_metric(-1)

    def _change_metric(self, by: int) -> None:
        self.panes.change_metric(self.run_watch, by)
        self._plotted = ((-1, -1), float("-inf"))
        self._plot()

    @property
    def plot(self) -> LossPlot:
        """The plot on which the keys act."""
        return self.panes.plot

    @property
    def plot_options(self) -> PlotOptions:
        """How the plot, or the grid of plots, is drawn."""
        return self.panes.plot.options

    @property
    def plot_is_log(self) -> bool:
        """Whether the y axis is logarithmic now, by choice or by itself."""
        return self.panes.plot.is_log

    def set_plot_options(self, options: PlotOptions) -> None:
        """Draw the plot, or the grid of plots, with other options."""
        self.panes.plot.set_options(options)
        if self.panes.shows_grid:
            self.panes.plot_run(self.run_watch)

    def do_grid(self) -> None:
        """Show all metrics at once in a grid of small plots, or the loss alone again."""
        self.panes.toggle_grid(self.run_watch)
        self._plotted = ((-1, -1), float("-inf"))
        self.call_after_refresh(self._plot)

    def do_copy(self) -> None:
        """Copy the points of the plot, or the lines of another pane if that one is active."""
        name, text = self.panes.copied()
        if text.strip():
            self.app.copy_to_clipboard(text)
        self.show_message(f"copied {name}" if text.strip() else f"{name}: nothing to copy")

    def do_export_plot(self) -> None:
        """Write the plot as an SVG picture into the run's folder, and say its path."""
        plot = self.panes.plot
        self.write_plot(self.run_watch.directory.path, plot.label, plot.picture(clean(self.directory.name)))

    def do_next_pane(self) -> None:
        """Make the next pane active; after the last comes the first."""
        self.panes.choice.step(1)
        self._arrange()

    def do_previous_pane(self) -> None:
        """Make the previous pane active; before the first comes the last."""
        self.panes.choice.step(-1)
        self._arrange()

    def do_enlarge(self) -> None:
        """Show only the active pane; if it is already alone, show all panes again."""
        self.panes.choice.enlarged = not self.panes.choice.enlarged
        self._arrange()

    def step_back(self) -> bool:
        """Close the scores, else remove the cursor, else show all panes, else remove the filter; False if none is."""
        if self.scores.is_open:
            self.do_scores()
        elif self.panes.plot.cursor.x is not None:
            self.panes.plot.clear_cursor()
        elif self.panes.choice.enlarged:
            self.do_enlarge()
        elif self.panes.is_filtered:
            self.panes.clear_filter()
        else:
            return False
        return True

    def do_filter(self) -> None:
        """Ask for words that the shown events and lines of the log must contain."""
        self.panes.open_filter()

    def do_next_kind(self) -> None:
        """Narrow events or log to the next kind of lines, and say which."""
        self.show_message(self.panes.next_kind())

    def show_event(self, text: str) -> None:
        """Show in the pane of events those with all words of `text`; esc shows all again."""
        self.panes.show_only(text)
        self._arrange()

    def refresh_now(self) -> None:
        """Read the run and paint what has changed, at once."""
        self._read()
        self._paint()
