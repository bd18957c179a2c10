"""A plot as an SVG picture, for a report or a message: drawn from the same points as the plot on the screen.

Try: `svg_plot("loss", "steps", [SvgCurve("demo", series)], log=False)`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tui.plot.braille import PlotCurve, YRange, fit_y_range, tick_values
from tui.plot.cursor import format_x
from tui.plot.series import BoundedSeries, PlotColumn, smoothed

WIDTH, HEIGHT = 900, 420
"""Size of the picture."""

LEFT, RIGHT, TOP, BOTTOM = 80, 20, 60, 50
"""Margins around the curves."""

COLUMNS = 400
"""Points of a curve at most."""

SMOOTHING_HALF_LIFE = 0.03 * COLUMNS

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""The palette of Okabe and Ito, readable on white."""


@dataclass(frozen=True)
class SvgCurve:
    """A curve and its name in the legend."""

    name: str
    series: BoundedSeries


@dataclass(frozen=True)
class PlotRange:
    """The part of the x axis that is drawn."""

    start: float
    end: float


def svg_plot(
    title: str, axis: str, curves: Sequence[SvgCurve], shown: PlotRange, *, log: bool = False, smooth: bool = False
) -> str:
    """Return the picture as SVG. `axis` is "steps", "tokens" or "time"; `log` makes the y axis logarithmic, `smooth`
    draws moving averages. Without any point it has axes only."""
    columns = [each.series.columns(COLUMNS, shown.start, shown.end) for each in curves]
    columns = [smoothed(each, SMOOTHING_HALF_LIFE) for each in columns] if smooth else columns
    y_range = fit_y_range([PlotCurve(each, "") for each in columns], log=log) or YRange(0.0, 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="16">{escape(title)}</text>',
        *_y_axis(y_range),
        *_x_axis(axis, shown),
    ]
    for number, (curve, points) in enumerate(zip(curves, columns, strict=True)):
        parts += _curve(curve.name, points, number, y_range, log)
    return "\n".join([*parts, "</svg>", ""])


def _y(y_range: YRange, value: float) -> float:
    return TOP + (1 - y_range.share(value)) * (HEIGHT - TOP - BOTTOM)


def _y_axis(y_range: YRange) -> list[str]:
    lines = []
    for value in tick_values(y_range, 6):
        y = _y(y_range, value)
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    return lines


def _x_axis(axis: str, shown: PlotRange) -> list[str]:
    bottom, width = HEIGHT - BOTTOM, WIDTH - LEFT - RIGHT
    lines = [f'<path d="M{LEFT} {bottom}H{WIDTH - RIGHT}" stroke="#222"/>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        label = format_x(axis, shown.start + share * (shown.end - shown.start))
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        lines.append(f'<text x="{LEFT + share * width:.0f}" y="{bottom + 18}" text-anchor="{anchor}">{label}</text>')
    middle = LEFT + width / 2
    return [*lines, f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(axis)}</text>']


def _curve(name: str, columns: Sequence[PlotColumn | None], number: int, y_range: YRange, log: bool) -> list[str]:
    """The line of one curve and its entry in the legend."""
    step, colour = (WIDTH - LEFT - RIGHT) / COLUMNS, COLOURS[number % len(COLOURS)]
    points = [
        f"{LEFT + (place + 0.5) * step:.1f},{_y(y_range, column.mean):.1f}"
        for place, column in enumerate(columns)
        if column is not None and (column.mean > 0 or not log)
    ]
    across, down = LEFT + 200 * (number % 4), 40 + 14 * (number // 4)
    dash = f' stroke-dasharray="{6 + 3 * (number // len(COLOURS))} 4"' if number >= len(COLOURS) else ""
    line = f'stroke="{colour}" stroke-width="2"{dash}'
    return [
        f'<polyline points="{" ".join(points)}" fill="none" stroke-linejoin="round" {line}/>',
        f'<path d="M{across} {down - 4}h18" {line}/><text x="{across + 24}" y="{down}">{escape(name)}</text>',
    ]
