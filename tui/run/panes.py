"""The panes of the Run screen: loss, figures, ranks, events, log and memory, arranged for the size of the terminal.

`RunPanes` is given what was read of a run and paints it. One pane is active: keys that scroll, filter or enlarge act on
it, and its heading is shown reversed.

Try: `tunedeck`, Enter on a run, then `tab` and `z`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Input

from tui.plot.loss_plot import LossPlot, LossPlotData, StepMarks
from tui.plot.metric_grid import GridPlot, MetricGrid
from tui.plot.metrics import LOSS, METRICS, Metric, metric_beside
from tui.plot.run_curve import RunCurve
from tui.run.gpus import gpu_lines
from tui.run.line_kinds import EVENT_KINDS, LOG_LEVELS, next_kind
from tui.run.log_tail import LogLine, LogTail
from tui.run.memory import memory_lines
from tui.run.pane_choice import PANES, PaneChoice
from tui.run.panels import event_lines, figure_lines, figure_strip, in_columns, log_lines
from tui.run.ranks import rank_lines
from tui.run.scores import sample_lines
from tui.run.scores_pane import ScoresPane
from tui.run.watch import FeedLine, RunWatch
from tui.widgets.filter_field import FilterField
from tui.widgets.memory_bar import Look
from tui.widgets.scrollback import Scrollback
from tui.widgets.text_lines import TextLines

TAB_LABELS = {"log": "engine log", "samples": "answers"}
"""What the tab of a pane says, where that is not the pane's name."""

MAX_RANK_LINES = 9
"""Lines for the ranks on a screen that shows all panes: a heading and eight ranks."""

MAX_GPU_LINES = (3, 13)
"""Lines for the GPUs on a screen that shows all panes, of fewer than TALL rows and of more."""

TALL = 45
"""Rows of the terminal from which on there is room for graphs of several lines."""

BOXES = ("words", "upper", "lower")
"""The containers of panes, inner ones first: each is hidden while all of its panes are."""


class RunPanes(Vertical):
    """The widget with all panes of the Run screen; `PaneChoice` decides which are shown."""

    def __init__(self, glyphs: Callable[[str], str], ascii_only: bool) -> None:
        super().__init__(id="run-panes")
        self._glyphs, self._ascii_only = glyphs, ascii_only
        self.choice = PaneChoice(room="")
        self._rank_lines = 0
        """Lines that the ranks take; 0 for a run of one process."""
        self._cards = 0
        """Number of GPUs of which there are readings."""
        self._has_samples = False
        """Whether there are generated samples."""
        self._feed_shown = 0
        """Number of events that were given to the events pane."""
        self._curve: RunCurve | None = None
        """What is plotted, if it is not the loss alone: another metric, or all of them in a grid."""

    def compose(self) -> ComposeResult:
        """Yield one widget for each pane, and the field of the filter."""
        yield TextLines(id="all-tabs", classes="tabs")
        yield TextLines(id="strip")
        with Horizontal(id="upper"):
            yield LossPlot(self._glyphs, self._ascii_only, id="loss")
            yield MetricGrid(self._glyphs, self._ascii_only, id="grid")
        yield TextLines(id="word-tabs", classes="tabs")
        yield TextLines(id="ranks", classes="pane")
        yield TextLines(id="gpus", classes="pane")
        with Horizontal(id="lower"):
            yield TextLines(id="figures", classes="pane")
            with Vertical(id="words"):
                yield Scrollback[FeedLine]("events", event_lines, _event_words, empty="no event yet", id="events")
                yield Scrollback[LogLine]("engine log", log_lines, _log_words, empty="nothing was written", id="log")
            yield TextLines(id="memory", classes="pane")
            yield ScoresPane(id="samples")
        yield FilterField("show only lines that contain all of these words, such as warning, or eval")

    @property
    def _look(self) -> Look:
        return Look(letters=self._ascii_only or self.app.no_color, ascii_only=self._ascii_only)

    @property
    def plot(self) -> LossPlot:
        """The widget of the loss pane, which plots the chosen metric."""
        return self.query_one(LossPlot)

    @property
    def scrolled(self) -> Scrollback[Any] | ScoresPane:
        """The pane on which scroll keys act: log or samples if that is the active pane, else the events."""
        if self.choice.active == "samples":
            return self.query_one("#samples", ScoresPane)
        return self._words

    @property
    def _words(self) -> Scrollback[Any]:
        """The pane on which filters act: the log if it is the active pane, else the events."""
        return self.query_one("#log" if self.choice.active == "log" else "#events", Scrollback)

    @property
    def scrolls(self) -> bool:
        """Whether the pane on which scroll keys act is shown."""
        return self.scrolled.id in self.choice.shown

    def show_panes(self, room: str) -> None:
        """Show the panes for which there is room (see `PaneChoice.room`), and hide the others."""
        choice = self.choice
        if not choice.room and room == "one":
            choice.activate("loss")
        choice.room, choice.has_ranks, choice.has_gpus = room, bool(self._rank_lines), bool(self._cards)
        choice.has_samples, choice.samples_beside = self._has_samples, self.screen.has_class("-wide")
        if choice.active not in choice.names:
            choice.activate("events")
        for name in PANES:
            self.query_one(f"#{name}").display = name in choice.shown
        self.grid.display = self.plot.display and self.shows_grid
        self.plot.display = self.plot.display and not self.shows_grid
        table = self.query_one("#ranks", TextLines)
        table.styles.height = self._rank_lines if room == "all" and not choice.enlarged else "1fr"
        self.query_one("#gpus").styles.height = self._gpu_height if room == "all" and not choice.enlarged else "1fr"
        self.screen.set_class(bool(self._rank_lines), "-ranks")
        self.screen.set_class(choice.enlarged, "-enlarged")
        for box in BOXES:
            found = self.query_one(f"#{box}")
            found.display = any(child.display for child in found.children)
        for pane in self.query(Scrollback):
            pane.headed, pane.active = not choice.tabs, pane.id == choice.active
            pane.redraw_heading()
        self.plot.active = self.grid.active = choice.active == "loss"
        for name, where in (("#all-tabs", "one"), ("#word-tabs", "regular")):
            tabs = self.query_one(name, TextLines)
            tabs.display = room == where and bool(choice.tabs)
            tabs.show([_tabs(choice.tabs, choice.active)])

    def paint(self, watch: RunWatch) -> None:
        """Show the figures, ranks, events and memory of a run."""
        choice, ascii_only = self.choice, self._ascii_only
        strip = self.query_one("#strip", TextLines)
        strip.show(figure_strip(watch, self.size.width, max(1, strip.size.height), self._glyphs, ascii_only=ascii_only))
        figures = self.query_one("#figures", TextLines)
        numbers = figure_lines(watch, self._glyphs, ascii_only=self._ascii_only, with_ranks=choice.room != "all")
        height, width = figures.content_size.height, figures.content_size.width
        figures.show([*self._heading("figures", len(numbers) < height), *in_columns(numbers, height, width)])
        self.screen.set_class("expert_utilisation" in (watch.latest or {}), "-experts")
        memory = self.query_one("#memory", TextLines)
        behind = "  answers: tab" if choice.has_samples and not (choice.samples_beside or choice.tabs) else ""
        heading = [Content.assemble(line, (behind, "$muted")) for line in self._heading("memory", not choice.tabs)]
        memory.show([*heading, *memory_lines(watch, memory.size.width, self._look)])
        self._paint_ranks(watch)
        self._paint_gpus(watch)
        self._paint_samples(watch)
        new, self._feed_shown = watch.feed_total - self._feed_shown, watch.feed_total
        if new:
            self.query_one("#events", Scrollback).add(list(watch.feed)[-new:])

    def _heading(self, name: str, shown: bool) -> list[Content]:
        style = "bold reverse" if self.choice.active == name else "bold"
        return [Content.styled(f" {name} ", style)] if shown else []

    def _paint_ranks(self, watch: RunWatch) -> None:
        pane = self.query_one("#ranks", TextLines)
        fixed = self.choice.room == "all" and not self.choice.enlarged
        lines = rank_lines(watch, self.size.width, MAX_RANK_LINES if fixed else max(3, pane.size.height), self._glyphs)
        pane.show(lines)
        if len(lines) != self._rank_lines:
            self._rank_lines = len(lines)
            self.show_panes(self.choice.room)

    def _paint_samples(self, watch: RunWatch) -> None:
        pane = self.query_one("#samples", ScoresPane)
        lines = list(sample_lines(watch, pane.size.width, self._glyphs))
        if bool(lines) != self._has_samples:
            self._has_samples = bool(lines)
            self.show_panes(self.choice.room)
        style = "reverse" if self.choice.active == "samples" else ""
        pane.set_lines([*(line.stylize(style) for line in lines[:1]), *lines[1:]])

    @property
    def _gpu_height(self) -> int:
        """Lines for the GPUs on a screen that shows all panes: a heading, and as many as there are and fit."""
        tall = self.screen.size.height >= TALL
        return min(MAX_GPU_LINES[tall] + (0 if tall or self._rank_lines else 2), 1 + self._cards * (3 if tall else 1))

    def _paint_gpus(self, watch: RunWatch) -> None:
        if len(watch.gpus.cards) != self._cards:
            self._cards = len(watch.gpus.cards)
            self.show_panes(self.choice.room)
        pane, choice = self.query_one("#gpus", TextLines), self.choice
        fixed = choice.room == "all" and not choice.enlarged
        height = self._gpu_height if fixed else pane.size.height
        pane.show(
            gpu_lines(
                watch.gpus, self.size.width, max(2, height), self._glyphs, ascii_only=self._ascii_only,
                active=choice.active == "gpus",
            )
        )  # fmt: skip

    def plot_run(self, watch: RunWatch) -> None:
        """Draw the chosen metric of a run, with its evaluations and marks, or the grid of all metrics."""
        state, metric = watch.state, self.metric
        if self.shows_grid:
            curve = self._curve_of(watch)
            plots = [GridPlot(each.label, curve.over("steps", each)) for each in curve.metrics]
            self.grid.set_plots(plots, self.plot.options)
            return
        scores = [(e["step"], e["metrics"]["loss"]) for e in state.evals if e["metrics"].get("loss") is not None]
        marks = [
            StepMarks("checkpoint", "■", "$muted", watch.checkpoint_steps),
            *(StepMarks(name, glyph, "bold $caution", _alert_steps(watch, code)) for code, glyph, name in ALERT_MARKS),
            StepMarks("oom", "▲", "bold $bad", [event["step"] for event in state.backoffs]),
        ]
        if metric is LOSS:
            data = LossPlotData(watch.curves.loss, scores, marks, note="no step yet", may_be_log=True)
            self.plot.set_data(data)
        else:
            note = f"this run has recorded no {metric.label.partition(',')[0]}"
            self.plot.set_data(LossPlotData(self._curve_of(watch).over("steps"), [], marks, note, metric.label))

    @property
    def metric(self) -> Metric:
        """The metric that is plotted, one of METRICS; the loss at first."""
        return self._curve.metric if self._curve is not None else LOSS

    @property
    def metric_version(self) -> int:
        """A number that changes each time values of a metric other than the loss were read; 0 at first."""
        return self._curve.version if self._curve is not None else 0

    def read_metric(self, watch: RunWatch, *, seconds: float) -> bool:
        """Read values of the plotted metric from the run's journal for about `seconds`; returns whether anything was
        read. Does nothing while the loss is plotted, which `RunWatch` reads."""
        return self._curve is not None and self._curve_of(watch).read_more(seconds=seconds)

    @property
    def grid(self) -> MetricGrid:
        """The widget that shows all metrics at once, in the place of the plot."""
        return self.query_one(MetricGrid)

    @property
    def shows_grid(self) -> bool:
        """Whether all metrics are shown at once, instead of one."""
        return self._curve is not None and len(self._curve.metrics) > 1

    def toggle_grid(self, watch: RunWatch) -> None:
        """Show all metrics in a grid, or the loss alone again."""
        metrics = (each.for_capacity(_capacity(watch)) for each in METRICS)
        self._curve = None if self.shows_grid else RunCurve(watch.directory, *metrics)
        self.show_panes(self.choice.room)

    def change_metric(self, watch: RunWatch, by: int) -> None:
        """Plot the metric `by` places after the present one, or before it if `by` is negative."""
        chosen = metric_beside(self.metric, by).for_capacity(_capacity(watch))
        self._curve = None if chosen is LOSS else RunCurve(watch.directory, chosen)
        self.show_panes(self.choice.room)  # the plot takes the place of the grid

    def _curve_of(self, watch: RunWatch) -> RunCurve:
        """The curve of the plotted metric, begun anew for another run or stage."""
        if self._curve is None or self._curve.directory is not watch.directory:
            self._curve = RunCurve(watch.directory, *(self._curve.metrics if self._curve is not None else (LOSS,)))
        return self._curve

    def copied(self) -> tuple[str, str]:
        """What the key for copying takes: a name for it, and its text, which is empty if there is nothing. The points
        of the plot, or the lines of another pane if that one is active."""
        name = self.choice.active
        if name == "loss" and not self.shows_grid:
            return f"the points of {self.plot.label}", self.plot.copied()
        pane = self.query_one("#grid" if name == "loss" else f"#{name}", TextLines)
        return "all metrics" if name == "loss" else f"what {TAB_LABELS.get(name, name)} shows", pane.text

    def add_log(self, log: LogTail) -> None:
        """Add the lines that were written to the log since the last call."""
        pane = self.query_one("#log", Scrollback)
        pane.add(log.take())
        pane.show_unfinished(log.unfinished)

    def next_kind(self) -> str:
        """Narrow the log to another level if it is the active pane, else the events to another kind; returns what is
        shown now, as a sentence."""
        if self.choice.active != "log":
            self.choice.activate("events")
        self.show_panes(self.choice.room)
        pane, name = self._words, TAB_LABELS.get(self.choice.active, self.choice.active)
        kind, is_of_kind = next_kind(LOG_LEVELS if self.choice.active == "log" else EVENT_KINDS, pane.kind)
        pane.set_kind(kind, is_of_kind)
        return f"{name}: {kind}, {pane.shown_of}; F: next kind, esc: all" if kind else f"{name}: all"

    def has_new_events(self, watch: RunWatch) -> bool:
        """Whether the run has events that are not shown yet."""
        return watch.feed_total != self._feed_shown

    def change_run(self, watch: RunWatch) -> None:
        """Show the events of another run, or of another stage, and a log without lines."""
        self.query_one("#log", Scrollback).replace(())
        self.query_one("#events", Scrollback).replace(list(watch.feed))
        self._feed_shown = watch.feed_total

    def open_filter(self) -> None:
        """Show the field for the words of a filter, and give it the focus. The filter applies to events and log."""
        if self.choice.active != "log":
            self.choice.activate("events")
        self.show_panes(self.choice.room)
        self.query_one(FilterField).open()

    def show_only(self, words: str) -> None:
        """Filter events and log by words, without giving the field the focus."""
        self.choice.activate("events")
        field = self.query_one(FilterField)
        field.display, field.value = True, words

    @property
    def is_filtered(self) -> bool:
        """Whether a filter hides lines of events or log."""
        return bool(self.query_one(FilterField).value) or any(pane.kind for pane in self.query(Scrollback))

    def clear_filter(self) -> None:
        """Show all events and lines of the log."""
        for pane in self.query(Scrollback):
            pane.set_kind("", None)
        self.query_one(FilterField).clear_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the filter at every letter typed, to the events and to the log."""
        event.stop()
        for pane in self.query(Scrollback):
            pane.set_filter(event.value)

    def on_filter_field_left(self) -> None:
        """Take the focus from the field, so that keys act on the panes again."""
        self.screen.set_focus(None)


ALERT_MARKS = (
    ("slow_data", "≈", "slow data"), ("plateau", "─", "plateau"), ("gradient_spike", "↑", "gradient spike"),
    ("not_finite", "✗", "not finite"),
)  # fmt: skip
"""Codes of the engine's warnings that belong to a step, each with its mark on the plot and its name."""


def _alert_steps(watch: RunWatch, code: str) -> list[int]:
    return [int(found["step"]) for found in watch.state.warnings if found["code"] == code and found.get("step")]


def _event_words(line: FeedLine) -> str:
    return f"{line.kind} {line.text}"


def _log_words(line: LogLine) -> str:
    return line.text


def _tabs(names: Sequence[str], chosen: str) -> Content:
    parts = [(f" {TAB_LABELS.get(name, name)} ", "bold reverse" if name == chosen else "$muted") for name in names]
    return Content.assemble(" ", *parts, ("  tab: next", "$muted"))


def _capacity(watch: RunWatch) -> int:
    """Bytes of the device's memory that the run may use; 0 if they are unknown."""
    known = watch.state.predicted.get("capacity_bytes")
    return known if isinstance(known, int) else 0
