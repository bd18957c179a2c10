"""The GPUs of a run over the last minutes: a bounded history of the driver's readings, and small graphs of it.

A line of graphs stands for each GPU: use, memory, temperature and power, each from its latest value back in time. With
more room, each graph is several lines high. Block characters alone carry the height, so the graphs read without colour.

Try: `[line.plain for line in gpu_lines(watch.gpus, 120, 5, str, ascii_only=False)]`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

from textual.content import Content

from engine.journal.event_text import format_duration
from engine.journal.events import Event

HISTORY = 60
"""Readings that are kept for each GPU. The engine reads every ten seconds: the last ten minutes, or longer where a
training step takes longer than that."""

LABEL_WIDTH = 12
"""Cells before the first graph: the GPU's number, in the heading the name of the pane and the time it covers."""

VALUE_WIDTH = 9
"""Cells of a graph's latest value: "139.8 GiB"."""

EIGHTHS = " ▁▂▃▄▅▆▇█"
ASCII_EIGHTHS = " _.,-=+*#"

GIB = 2.0**30


class Gauge(NamedTuple):
    """One of the values that are drawn for each GPU."""

    name: str
    field: str
    """The field of the event `gpu`."""
    unit: str
    style: str
    top: float
    """The value at which the graph is full; 0: the greatest value, or the GPU's memory."""
    size: float = 1.0
    """The event's value is divided by this, to be in `unit`."""
    digits: int = 0


GAUGES = (
    Gauge("use", "utilisation_percent", "%", "$info", 100.0),
    Gauge("memory", "used_bytes", "GiB", "$mark", 0.0, GIB, 1),
    Gauge("heat", "temperature_celsius", "°C", "$caution", 100.0),
    Gauge("power", "power_watts", "W", "$good", 0.0),
)


class GpuReading(NamedTuple):
    """One reading of a GPU: when, and the value of each of GAUGES, None where the driver does not report it."""

    time: str
    values: tuple[float | None, ...]
    total: float
    """The GPU's memory in GiB; 0 if it is unknown."""


class GpuHistory:
    """The latest readings of each GPU of a run, by its number. Readings before a new start of the engine are dropped,
    so that every graph covers one stretch of time."""

    def __init__(self) -> None:
        self.cards: dict[int, deque[GpuReading]] = {}

    def add(self, event: Event) -> None:
        """Add the reading of an event `gpu`; an event without a number for the GPU is ignored."""
        index = event.get("index")
        if isinstance(index, int):
            values = tuple(_number(event.get(gauge.field), gauge.size) for gauge in GAUGES)
            reading = GpuReading(str(event.get("time", "")), values, _number(event.get("total_bytes"), GIB) or 0.0)
            self.cards.setdefault(index, deque(maxlen=HISTORY)).append(reading)

    def clear(self) -> None:
        """Drop all readings."""
        self.cards.clear()


def _number(value: object, size: float) -> float | None:
    return value / size if isinstance(value, int | float) and not isinstance(value, bool) else None


def gpu_lines(
    history: GpuHistory, width: int, height: int, glyphs: Callable[[str], str], *, ascii_only: bool,
    active: bool = False,
) -> list[Content]:  # fmt: skip
    """Return a heading and the graphs of each GPU, in at most `height` lines of `width` cells: all graphs equally high,
    at least one line each. GPUs for which there is no room are counted in the last line. `glyphs` replaces the
    console's glyphs by ASCII characters where necessary."""
    cards = dict(sorted(history.cards.items()))
    room = max(1, height - 1)
    if not cards:
        return []
    rows = max(1, min(4, room // len(cards)))
    shown = list(cards)[: room if len(cards) <= room else max(1, room - 1)]
    column = max(VALUE_WIDTH + 3, (width - LABEL_WIDTH) // len(GAUGES))
    tops = [_top(number, cards) for number in range(len(GAUGES))]
    lines = [_heading(cards, tops, column, glyphs, active)]
    for index in shown:
        lines += _card(index, cards[index], tops, column, rows, glyphs, ascii_only)
    left_out = len(cards) - len(shown)
    return [*lines, Content.styled(f"  and {left_out} more: tab to this pane, then z", "$muted")] if left_out else lines


def _top(number: int, cards: Mapping[int, Sequence[GpuReading]]) -> float:
    """The value at which the graphs of a gauge are full, the same for all GPUs."""
    gauge = GAUGES[number]
    if gauge.top:
        return gauge.top
    known = [reading.values[number] or 0.0 for card in cards.values() for reading in card]
    totals = [reading.total for card in cards.values() for reading in card] if gauge.field == "used_bytes" else []
    return max([*known, *totals, 1.0])


def _heading(
    cards: Mapping[int, Sequence[GpuReading]], tops: Sequence[float], column: int, glyphs: Callable[[str], str],
    active: bool,
) -> Content:  # fmt: skip
    """The name of the pane, the time that the graphs cover, and the name and the full height of each graph."""
    name = Content.styled(" gpus ", "bold reverse" if active else "bold")
    covered = _covered(max(cards.values(), key=len))
    parts = [Content.assemble(name, (covered, "$muted")).pad_right(LABEL_WIDTH - name.cell_length - len(covered))]
    for gauge, top in zip(GAUGES, tops, strict=True):
        text = f"{gauge.name:>{VALUE_WIDTH}} to {top:.{gauge.digits}f} {gauge.unit}"
        text = text if len(text) < column else f"{gauge.name:>{VALUE_WIDTH}}"
        parts.append(Content.styled(glyphs(f"{text:<{column}}"), "$muted"))
    return Content.assemble(*parts)


def _covered(readings: Sequence[GpuReading]) -> str:
    """The time from the first to the last of these readings, such as "9 min"; empty if it is unknown."""
    try:
        first, last = (datetime.fromisoformat(readings[place].time) for place in (0, -1))
        seconds = (last - first).total_seconds()
    except (ValueError, TypeError):
        return ""
    return (f"{seconds / 60:.0f} min" if seconds < 3600 else format_duration(seconds))[: LABEL_WIDTH - 7]


def _card(
    index: int, readings: Sequence[GpuReading], tops: Sequence[float], column: int, rows: int,
    glyphs: Callable[[str], str], ascii_only: bool,
) -> list[Content]:  # fmt: skip
    """The lines of one GPU: the latest values on the last of them, beside graphs of `rows` lines."""
    graph_width = column - VALUE_WIDTH - 2
    graphs = [
        bar_graph([reading.values[number] for reading in readings], graph_width, rows, tops[number], ascii_only)
        for number in range(len(GAUGES))
    ]
    lines = []
    for row in range(rows):
        last = row == rows - 1
        parts: list[tuple[str, str]] = [(f" GPU {index}".ljust(LABEL_WIDTH) if last else " " * LABEL_WIDTH, "$muted")]
        for gauge, value, graph in zip(GAUGES, readings[-1].values, graphs, strict=True):
            parts.append((glyphs(_value(gauge, value)) if last else " " * VALUE_WIDTH, ""))
            parts.append((f" {graph[row]} ", gauge.style))
        lines.append(Content.assemble(*parts))
    return lines


def _value(gauge: Gauge, value: float | None) -> str:
    text = "-" if value is None else f"{value:.{gauge.digits}f} {gauge.unit}"
    return f"{text:>{VALUE_WIDTH}}"[:VALUE_WIDTH]


def bar_graph(values: Sequence[float | None], width: int, height: int, top: float, ascii_only: bool) -> list[str]:
    """Draw values as bars from zero to `top`, the latest at the right end, in `height` lines of `width` cells. With
    more values than cells, a bar is the mean of neighbours; None leaves a gap."""
    letters = ASCII_EIGHTHS if ascii_only else EIGHTHS
    bars = _fitted(values, width)
    eighths = [None if bar is None else max(1, round(8 * height * min(1.0, max(0.0, bar / top)))) for bar in bars]
    return [
        "".join(" " if bar is None else letters[max(0, min(8, bar - 8 * below))] for bar in eighths).rjust(width)
        for below in reversed(range(height))
    ]


def _fitted(values: Sequence[float | None], width: int) -> list[float | None]:
    """At most `width` values: the means of equal shares of them, where there are more."""
    if len(values) <= width:
        return list(values)
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    groups = [[value for value in values[a:b] if value is not None] for a, b in pairwise(edges)]
    return [sum(group) / len(group) if group else None for group in groups]
