"""The points that a plot shows, as text for the clipboard: columns separated by tabs, as a spreadsheet takes them.

Try: `print(points_text("steps", ["loss"], [series], XScale(1, 30, 60)))`
"""

from __future__ import annotations

from collections.abc import Sequence

from tui.plot.cursor import XScale
from tui.plot.series import BoundedSeries, Reading


def points_text(axis: str, names: Sequence[str], series: Sequence[BoundedSeries], scale: XScale) -> str:
    """Return a heading, and a line for each column of the plot in which a series has points: where they begin on the x
    axis, and their mean in each series. A single series also has their least and greatest value."""
    alone = len(series) == 1
    lines, before = ["\t".join([axis, *names, *(["least", "greatest"] if alone else [])])], None
    for column in range(scale.width):
        found = [each.reading(*scale.bounds(column)) for each in series]
        known = [reading for reading in found if reading is not None]
        if not known or found == before:
            continue
        before = found
        cells = [f"{known[0].first:.10g}", *map(_mean, found)]
        lines.append("\t".join([*cells, *([f"{known[0].least:.6g}", f"{known[0].greatest:.6g}"] if alone else [])]))
    return "\n".join(lines) + "\n"


def _mean(reading: Reading | None) -> str:
    return "" if reading is None else f"{reading.mean:.6g}"
