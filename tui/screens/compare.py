"""Compare: a metric of the marked runs in one plot, and a table of the settings that differ and of the scores.

Try: mark runs with space on the Runs screen, then `c`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from textual.app import ComposeResult
from textual.content import Content

from engine.errors import TunedeckError, UsageError
from engine.journal.compare import CompareRow, Comparison, compare_summaries, score_rows, setting_rows, training_rows
from engine.journal.directory import RunDirectory, read_spec
from engine.journal.evaluations import read_evaluations
from engine.journal.event_text import clean
from engine.journal.score_groups import RESAMPLES, Gains, ScoreGroup, gains, headline_metric
from engine.journal.summary import SummaryReader
from tui.keys import Key, bindings
from tui.plot.cursor import format_x
from tui.plot.loss_plot import PlotOptions
from tui.plot.metrics import LOSS, metric_beside
from tui.plot.overlay_plot import OverlayData, OverlayPlot, letter_of, style_of
from tui.plot.run_curve import AXES, RunCurve
from tui.run.listing import short_name
from tui.run.scores import bar_lines, full_bar
from tui.screens.model_keys import MODEL_ACTIONS, ModelKeys
from tui.screens.plot_keys import PlotKeys
from tui.widgets.row_list import RowList
from tui.widgets.text_lines import TextLines

POLL_SECONDS = 1.0
"""Interval at which the runs are read."""

CATCH_UP_SECONDS = 0.02
"""The interval while long journals are read."""

READ_SECONDS = 0.04
"""Most seconds for which one poll reads journals."""

TABLE_SECONDS = 5.0
"""Interval at which the table is updated, once every run has been read."""

PAINT_SECONDS = 0.5
"""Interval between repaints while long journals are read."""

FOLLOW_SECONDS = 2.0
"""Least interval between repaints for new steps of a run that goes on; each is 3 KB over SSH."""

MOST_RESAMPLED = 500
"""Samples up to which intervals of gains are computed here, which takes 0.1 s for each run; `tunedeck compare` computes
them for any number."""

NAME_WIDTH, ARROW_WIDTH = 30, 5
LEAST_COLUMN, MOST_COLUMN = 11, 26
"""Cells of the labels, of the arrow that says how many rows follow, and of a run's column."""


class CompareScreen(PlotKeys, ModelKeys):
    """The screen that shows the curves of several runs, and a table of the settings and scores in which they
    differ."""

    screen_name = "compare"
    BINDINGS = bindings("compare")

    def __init__(self) -> None:
        super().__init__()
        self._curves: list[RunCurve] = []
        self._readers: list[SummaryReader] = []
        self._found: Comparison | None = None
        self._read_error = ""
        self._gains: Gains | None = None
        self._gains_stamp: list[list[str]] = []
        self._axis, self._metric, self._options = AXES[0], LOSS, PlotOptions()
        self._table_due = self._paint_due = 0.0
        self._stale = False
        self._catches_up = True
        """Whether the journals have not been read to their ends yet, since the runs or the metric were chosen."""

    def compose_body(self) -> ComposeResult:
        """Yield the plot, its legend and the table."""
        yield OverlayPlot(self.console.ascii_only, id="overlay")
        yield TextLines(id="overlay-legend", classes="heading")
        yield RowList(id="differences", classes="pane")

    def set_argument(self, argument: object) -> None:
        """Take the runs to compare. Without an argument, the runs compared before are shown again."""
        if argument:
            runs = cast("Sequence[RunDirectory]", argument)
            self._curves = [RunCurve(run, self._metric) for run in runs]
            self._readers = [SummaryReader(run) for run in runs]
            self._found, self._table_due, self._catches_up = None, 0.0, True
            self._gains, self._gains_stamp = None, []

    def on_screen_resume(self) -> None:
        """Repaint when the screen is shown, since other runs may have been chosen."""
        super().on_screen_resume()
        self.call_after_refresh(self._paint)

    def repaint_panes(self) -> None:
        """Draw plot and table for the sizes that they have now."""
        self._focus_table()
        self._paint()

    def poll(self) -> float:
        """Read new lines of the runs' journals; returns the seconds until the next reading."""
        self.tell_scorings()
        return CATCH_UP_SECONDS if self._read() else POLL_SECONDS

    @property
    def chosen_runs(self) -> list[RunDirectory]:
        """All compared runs."""
        return [curve.directory for curve in self._curves]

    def _read(self) -> bool:
        """Read new lines of the runs' journals, for READ_SECONDS in total, and repaint if necessary; returns whether
        anything was added."""
        each = READ_SECONDS / max(1, 2 * len(self._curves))
        news = [curve.read_more(seconds=each) for curve in self._curves]
        if self._curves and time.monotonic() >= self._table_due:
            news.append(self._compare(each))
        self._stale = self._stale or any(news)
        self._catches_up = any(news) and self._catches_up
        if self._stale and time.monotonic() >= self._paint_due:
            self._paint()
        return any(news)

    def _compare(self, seconds: float) -> bool:
        """Read the summaries of all runs, each for about `seconds`, and once all are read to their ends update the
        table. Returns whether anything may have changed. If a run's folder no longer exists, the table stays as it is.
        """
        if self._found is not None and not all(reader.directory.exists() for reader in self._readers):
            return False
        try:
            if not all(reader.read(seconds=seconds) for reader in self._readers):
                return True
            specs = [read_spec(reader.directory) for reader in self._readers]
            scored = [read_evaluations(reader.directory) for reader in self._readers]
            summaries = [reader.summary() for reader in self._readers]
            self._found, self._read_error = compare_summaries(summaries, specs, scored), ""
            self._update_gains([[each.time for each in one] for one in scored])
        except (TunedeckError, OSError) as error:
            self._read_error = clean(getattr(error, "found", str(error)))
        self._table_due = time.monotonic() + TABLE_SECONDS
        return True

    def _update_gains(self, stamp: list[list[str]]) -> None:
        """Compute each run's gain over the first run, if scores have changed. `stamp` has the times of all evaluations
        of each run; nothing is computed if they are those of the last call."""
        if stamp == self._gains_stamp or self._found is None:
            return
        self._gains_stamp, self._gains = stamp, None
        directories, groups = [reader.directory for reader in self._readers], self._found.groups
        if groups and len(directories) > 1:
            resamples = RESAMPLES if groups[0].count <= MOST_RESAMPLED else 0
            with suppress(UsageError):  # the first run is not scored, or no other on the same samples
                metric = headline_metric(groups[0])
                self._gains = gains(directories, metric, directories[0].name, resamples=resamples)

    def _paint(self) -> None:
        wait = PAINT_SECONDS if self._catches_up else FOLLOW_SECONDS
        self._stale, self._paint_due = False, time.monotonic() + wait
        series = [curve.over(self._axis) for curve in self._curves]
        end = max((each.end for each in series), default=0.0)
        if self._curves:
            texts = self._axis, format_x(self._axis, end), self._options, self._metric.label
            self.plot.set_data(OverlayData(series, *texts, may_be_log=self._metric == LOSS))
        self.cursor_moved()
        self.query_one("#differences", RowList).show(self._table())
        self.refresh_title_and_footer()

    def cursor_moved(self) -> None:
        """Show the legend: what is plotted, and the runs with their letters, or their values under the cursor."""
        if not self._curves:
            self.query_one("#overlay-legend", TextLines).show([])
            return
        words = [{"log": "log axis"}.get(word, word) for word in replace(self._options, log=self.plot_is_log).words]
        over = ", ".join([f"{self._metric.label} over {self._axis}", *words])
        other_pane = "table" if self.plot.has_class("-front") else "plot"
        over += self._alike()
        over += f"  tab: {other_pane}" if self.has_class("-one-pane") else ""
        names = self._names_in_brief() if self.has_class("-one-pane") else ()  # the table begins with them
        values = self.plot.read_off() or Content.assemble(*names)
        self.query_one("#overlay-legend", TextLines).show([Content.assemble((f" {self.glyphs(over)}  ", ""), values)])

    def _alike(self) -> str:
        """The letters of curves that lie on one another, of which the plot shows the last."""
        series = [curve.over(self._axis) for curve in self._curves]
        drawn = [(letter_of(number), each) for number, each in enumerate(series) if each.points]
        groups = [[letter for letter, other in drawn if other.equals(each)] for _, each in drawn]
        same = dict.fromkeys(", ".join(letters) for letters in groups if len(letters) > 1)
        return f" ({' and '.join(same)}: one line)" if same else ""

    def _names_in_brief(self) -> Iterator[tuple[str, str]]:
        """The letter and the name of each run, for the legend of the plot: without its time, which the table has,
        unless two differ in nothing else."""
        full = [clean(curve.directory.name) for curve in self._curves]
        brief = [clean(short_name(curve.directory)) for curve in self._curves]
        for number, name in enumerate(full if len(set(brief)) < len(brief) else brief):
            yield f" {letter_of(number)} ", f"bold {style_of(number)}"
            yield f"{name} ", "$muted"

    def _table(self) -> list[Content]:
        if not self._curves:
            return [Content.styled("  1 opens Runs: space marks a run there, and c compares the marked ones", "$muted")]
        if self._read_error:
            return [*Content.styled(self._read_error, "$bad").wrap(max(1, self.size.width))]
        if self._found is None:
            return [Content.styled("  reading", "$muted")]
        return [*self._names(self._found), *self._rows(self._found)]

    def _names(self, found: Comparison) -> list[Content]:
        return [
            Content.assemble(
                (f" {letter_of(number)} ", f"bold {style_of(number)}"), f"{clean(name)} ", (status, "$muted"),
                (f"  {clean(self._curves[number].read_error)}", "$bad"),
            )
            for number, (name, status) in enumerate(zip(found.runs, found.statuses, strict=True))
        ]  # fmt: skip

    def _rows(self, found: Comparison) -> list[Content]:
        letters = [(f"{letter_of(number)}  ", f"bold {style_of(number)}") for number in range(len(found.runs))]
        lines = [_line("", letters, self.size.width)]
        lines += [_row_line(row, self.size.width) for row in (*setting_rows(found), *score_rows(found))]
        if self._gains is not None:
            lines += [*_gain_lines(self._gains, found.runs, self.size.width)]
        for group in found.groups[:1]:
            lines += [*_bars(group, headline_metric(group), self.size.width, self.glyphs)]
        lines += [_row_line(row, self.size.width) for row in training_rows(found)]
        lines += [*_sentence_lines(found.sentence, self.size.width)]
        return [*lines, *(Content.styled(f"  {clean(warning)}", "$caution") for warning in found.warnings)]

    def title_detail(self) -> str:
        """The number of compared runs."""
        return f"{len(self._curves)} runs" if self._curves else ""

    def footer_rows(self) -> list[Key]:
        """All keys, with "back": this screen is opened from the Runs screen, and there the marked runs are chosen."""
        return self.key_rows()

    def disabled_reason(self, action: str) -> str | None:
        """Why a key has no effect: no runs are marked, or both panes are visible already; None if the key has an
        effect."""
        if action in MODEL_ACTIONS and self._curves:
            return self.no_model_reason()
        if action == "next_pane" and not self.has_class("-one-pane"):
            return "plot and table are both shown"
        return None if self._curves else "no run is marked; space on the Runs screen marks one"

    def do_next_pane(self) -> None:
        """Switch between the plot and the table."""
        for pane in self.query(".pane"):
            pane.toggle_class("-front")
        self._focus_table()
        self.call_after_refresh(self._paint)

    def _focus_table(self) -> None:
        """Give the table the focus, so that keys scroll it, but not while the plot hides it."""
        hidden = self.has_class("-one-pane") and self.plot.has_class("-front")
        self.set_focus(None if hidden else self.query_one(RowList))

    def do_axis(self) -> None:
        """Switch to the next x axis: steps, tokens, time."""
        self._axis = AXES[(AXES.index(self._axis) + 1) % len(AXES)]
        self._paint()

    @property
    def plot(self) -> OverlayPlot:
        """The plot on which the keys act."""
        return self.query_one(OverlayPlot)

    @property
    def plot_options(self) -> PlotOptions:
        """How the plot is drawn."""
        return self._options

    @property
    def plot_is_log(self) -> bool:
        """Whether the y axis is logarithmic now, by choice or by itself."""
        return self.plot.is_log

    def set_plot_options(self, options: PlotOptions) -> None:
        """Draw the plot with other options."""
        self._options = options
        self._paint()

    def do_next_metric(self) -> None:
        """Plot the next metric of METRICS; after the last comes the first."""
        self._change_metric(1)

    def do_previous_metric(self) -> None:
        """Plot the previous metric of METRICS; before the first comes the last."""
        self._change_metric(-1)

    def _change_metric(self, by: int) -> None:
        self._metric = metric_beside(self._metric, by)
        self._curves = [RunCurve(curve.directory, self._metric) for curve in self._curves]
        self._catches_up, self._paint_due = True, 0.0
        self._stop_polling()
        self._poll_again()

    def do_copy(self) -> None:
        """Copy the points of the plot."""
        text = self.plot.copied([clean(curve.directory.name) for curve in self._curves])
        if text:
            self.app.copy_to_clipboard(text)
        self.show_message(f"copied the points of {self._metric.label}" if text else "nothing to copy")

    def do_export_plot(self) -> None:
        """Write the plot as an SVG picture into the working directory, and say its path."""
        picture = self.plot.picture([clean(curve.directory.name) for curve in self._curves])
        self.write_plot(Path.cwd(), f"compare-{self._metric.label}", picture)

    def step_back(self) -> bool:
        """Remove the cursor, else show both panes again; returns False if there is neither."""
        if self.plot.cursor.x is None:
            return super().step_back()
        self.plot.clear_cursor()
        self.cursor_moved()
        return True


def _row_line(row: CompareRow, width: int) -> Content:
    """One row of the table; of a score, the best cells are bold and have a star."""
    if not row.cells:
        return Content.styled(f" {row.label}", "bold")
    marked = zip(row.cells, row.best or [False] * len(row.cells), strict=True)
    cells = [(clean(cell) + (" *" if wins else "  "), "bold" * wins) for cell, wins in marked]
    return _line(f"  {row.label}", cells, width)


def _gain_lines(found: Gains, runs: Sequence[str], width: int) -> Iterator[Content]:
    """A row with each run's gain over the first, and the sentence that names the best."""
    by_run = {row.run: row for row in found.rows}
    cells = [f"{by_run[run].gain:+.4g}  " if run in by_run else "-  " for run in runs]
    yield _line(f"  gain over {letter_of(runs.index(found.against))}", [(cell, "") for cell in cells], width)
    yield from _sentence_lines(found.sentence, width)


def _sentence_lines(sentence: str, width: int) -> Iterator[Content]:
    """The lines of a sentence that names the best run, wrapped; none if it is empty."""
    for part in Content.styled(clean(sentence), "$mark").wrap(max(20, width - 2)) if sentence else ():
        yield part.pad_left(1)


def _bars(group: ScoreGroup, metric: str, width: int, glyphs: Callable[[str], str]) -> Iterator[Content]:
    """Yield the name of a metric and a bar for each scored checkpoint of each run, all on one scale. `glyphs` replaces
    the console's glyphs by ASCII characters where necessary."""
    full_at = full_bar(metric, [values.get(metric) for found in group.checkpoints for values in found.values()])
    for number, found in enumerate(group.checkpoints):
        rows: dict[int, float | None] = {step: values.get(metric) for step, values in found.items()}
        lines = list(bar_lines(metric, rows, max(6, min(40, width - 36)), glyphs, full_at=full_at))
        if lines:
            head = (f" {letter_of(number)} ", f"bold {style_of(number)}")
            yield Content.assemble(head, lines[0].plain.strip() if number == 0 else "")
            yield from lines[1:]


def _line(label: str, cells: Sequence[tuple[str, str]], width: int) -> Content:
    """Format one row of the table: its label, then (text, style) of each run's cell, for a screen of `width` cells.
    Long values are cut; `tunedeck compare` prints them in full."""
    name = Content(label).truncate(NAME_WIDTH - 1, ellipsis=True)
    parts = [name.pad_right(NAME_WIDTH - name.cell_length)]
    column = _column_width(len(cells), width)
    for text, style in cells:
        cell = Content.styled(text, style).truncate(column - 1, ellipsis=True)
        parts.append(cell.pad_left(column - cell.cell_length))
    return Content.assemble(*parts)


def _column_width(runs: int, width: int) -> int:
    """Cells of a run's column: more where there is room for all of them, and for the arrow at the end of the list."""
    return max(LEAST_COLUMN, min(MOST_COLUMN, (width - NAME_WIDTH - ARROW_WIDTH) // max(1, runs)))
