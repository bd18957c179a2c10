"""Compare: marked runs in one plot, and a table of the settings that differ and the scores, the best marked.

Try: mark runs with space on the Runs screen, then `c`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from textual.app import ComposeResult
from textual.content import Content

from engine.errors import TunedeckError
from engine.journal.compare import Comparison, compare_summaries, format_compared_score, format_setting
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean, format_duration
from engine.journal.summary import SummaryReader, read_spec
from tui.keys import bindings
from tui.plot.overlay_plot import Overlay, OverlayPlot, letter_of, style_of
from tui.plot.run_curve import AXES, Curve
from tui.screens.base import BaseScreen
from tui.widgets.row_list import Rows
from tui.widgets.text_lines import Lines

LOOK_SECONDS = 1.0
CATCH_UP_SECONDS = 0.02
SLICE_SECONDS = 0.04
TABLE_SECONDS = 5.0
"""Between two looks at the figures, once they have been read."""

PAINT_SECONDS = 0.5
"""Between two repaints while long histories are read."""

NAME_WIDTH = 26
COLUMN_WIDTH = 13


class CompareScreen(BaseScreen):
    """Two runs or more."""

    where = "compare"
    BINDINGS = bindings("compare")

    def __init__(self) -> None:
        super().__init__()
        self._curves: list[Curve] = []
        self._readers: list[SummaryReader] = []
        self._found: Comparison | None = None
        self._trouble = ""
        self._axis, self._log, self._smooth = AXES[0], False, False
        self._table_due = self._paint_due = 0.0
        self._stale = False

    def body(self) -> ComposeResult:
        """The plot, and the table under it."""
        yield OverlayPlot(self.console.ascii_only, id="overlay")
        yield Lines(id="overlay-legend", classes="heading")
        yield Rows(id="differences", classes="pane")

    def receive(self, argument: object) -> None:
        """The runs to compare; without any, those of the last time."""
        if argument:
            runs = cast("Sequence[RunDirectory]", argument)
            self._curves, self._readers = [Curve(run) for run in runs], [SummaryReader(run) for run in runs]
            self._found, self._table_due = None, 0.0

    def on_mount(self) -> None:
        """Begin to look."""
        self._look()

    def on_screen_resume(self) -> None:
        """Shown again, perhaps with other runs."""
        super().on_screen_resume()
        self.call_after_refresh(self._paint)

    def _look(self) -> None:
        busy = self.is_current and self._read()
        self.set_timer(CATCH_UP_SECONDS if busy else LOOK_SECONDS, self._look)

    def _read(self) -> bool:
        """Read on, for a slice of time whatever the number of runs; whether there was anything."""
        each = SLICE_SECONDS / max(1, 2 * len(self._curves))
        news = [curve.look(seconds=each) for curve in self._curves]
        if self._curves and time.monotonic() >= self._table_due:
            news.append(self._compare(each))
        self._stale = self._stale or any(news)
        if self._stale and (not any(news) or time.monotonic() >= self._paint_due):
            self._paint()
        return any(news)

    def _compare(self, seconds: float) -> bool:
        """The table, once every run was read to its end; what was known of a run that is gone stays."""
        if self._found is not None and not all(reader.directory.exists() for reader in self._readers):
            return False
        try:
            if not all(reader.read(seconds=seconds) for reader in self._readers):
                return True
            specs = [read_spec(reader.directory) for reader in self._readers]
            self._found, self._trouble = compare_summaries([reader.summary() for reader in self._readers], specs), ""
        except (TunedeckError, OSError) as error:
            self._trouble = clean(getattr(error, "found", str(error)))
        self._table_due = time.monotonic() + TABLE_SECONDS
        return True

    def _paint(self) -> None:
        self._stale, self._paint_due = False, time.monotonic() + PAINT_SECONDS
        series = [curve.over(self._axis) for curve in self._curves]
        end = max((each.end for each in series), default=0.0)
        label = format_duration(end) if self._axis == "time" else f"{end:,.0f}"
        self.query_one(OverlayPlot).put(Overlay(series, self._axis, label, self._log, self._smooth))
        over = f"loss over {self._axis}" + (", log axis" if self._log else "") + (", smoothed" if self._smooth else "")
        there = "table" if self.query_one(OverlayPlot).has_class("-front") else "plot"
        over += f"  tab: {there}" if self.has_class("-one-pane") else ""
        self.query_one("#overlay-legend", Lines).show([Content(f" {over}")])
        self.query_one("#differences", Rows).show(self._table())
        self.refresh_bars()

    def _table(self) -> list[Content]:
        if not self._curves:
            return [Content.styled("  mark runs on the Runs screen with space, then press c there", "$muted")]
        if self._trouble:
            return [*Content.styled(self._trouble, "$bad").wrap(max(1, self.size.width))]
        if self._found is None:
            return [Content.styled("  reading", "$muted")]
        return [*self._names(self._found), *self._rows(self._found)]

    def _names(self, found: Comparison) -> list[Content]:
        return [
            Content.assemble(
                (f" {letter_of(number)} ", f"bold {style_of(number)}"), f"{clean(name)} ", (status, "$muted"),
                (f"  {clean(self._curves[number].trouble)}", "$bad"),
            )
            for number, (name, status) in enumerate(zip(found.runs, found.statuses, strict=True))
        ]  # fmt: skip

    def _rows(self, found: Comparison) -> list[Content]:
        letters = "".join(f"{letter_of(number):>{COLUMN_WIDTH}}" for number in range(len(found.runs)))
        lines = [Content.styled(" " * NAME_WIDTH + letters, "bold")]
        for key, values in found.settings.items():
            lines.append(_line(key, [(format_setting(value), "") for value in values]))
        for key, scores in found.scores.items():
            winners = found.best.get(key, [])
            best = [run in winners for run in found.runs]
            cells = [format_compared_score(key, score, wins) for score, wins in zip(scores, best, strict=True)]
            lines.append(_line(key, [(cell, "bold" * wins) for cell, wins in zip(cells, best, strict=True)]))
        return [*lines, *(Content.styled(f"  {clean(warning)}", "$caution") for warning in found.warnings)]

    def about(self) -> str:
        """How many runs."""
        return f"{len(self._curves)} runs" if self._curves else ""

    def why_not(self, action: str) -> str | None:
        """Nothing to draw without runs."""
        if action == "next_pane" and not self.has_class("-one-pane"):
            return "plot and table are in sight"
        return None if self._curves else "no run is marked: space on the Runs screen marks one"

    def do_next_pane(self) -> None:
        """The plot, or the table."""
        for pane in self.query(".pane"):
            pane.toggle_class("-front")
        self.set_focus(self.query_one(Rows))
        self.call_after_refresh(self._paint)

    def do_axis(self) -> None:
        """Over steps, tokens, time."""
        self._axis = AXES[(AXES.index(self._axis) + 1) % len(AXES)]
        self._paint()

    def do_log_axis(self) -> None:
        """Log axis, or not."""
        self._log = not self._log
        self._paint()

    def do_smooth(self) -> None:
        """Smoothed, or not."""
        self._smooth = not self._smooth
        self._paint()


def _line(key: str, cells: Sequence[tuple[str, str]]) -> Content:
    """One row of the table; long values are cut, their ends are in `tunedeck compare`."""
    name = Content(clean(key)).truncate(NAME_WIDTH - 2, ellipsis=True)
    parts = [name.pad_left(1).pad_right(NAME_WIDTH - 1 - name.cell_length)]
    for text, style in cells:
        cell = Content.styled(clean(text), style).truncate(COLUMN_WIDTH - 1, ellipsis=True)
        parts.append(cell.pad_left(COLUMN_WIDTH - cell.cell_length))
    return Content.assemble(*parts)
