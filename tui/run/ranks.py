"""What the Run screen says of the ranks of a run, side by side: functions from what is known of it to lines.

Every step tells what each rank did in it. One that computes for much longer than the others keeps all of them waiting;
one that runs out of memory costs all of them the attempt. Both are said in words beside the figures.

Try: `[line.plain for line in ranks(watch, 80, 10, str)]`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from textual.content import Content

from engine.journal.event_text import format_bytes, format_duration
from tui.run.watch import RunWatch

SLOW = 1.5
"""A rank is slow when it computes this many times as long as the median of the others."""

STEPS = 20
"""Latest steps whose mean counts: one slow step is no slow rank."""

LEAST_STEPS = 3
"""Below this many steps nobody is called slow."""

FIELDS = ("busy_seconds", "step_seconds", "peak_bytes", "micro_batches", "largest_micro_batch")
"""What a rank tells of a step that is shown here."""

FIGURES = 48
"""Cells of a line's figures, without bars."""

REMARK = 16
"""Cells that are left for what is remarkable before bars are drawn."""


@dataclass(frozen=True)
class RankRow:
    """One rank over the latest steps."""

    rank: int
    busy_seconds: float
    """Mean time in forward and backward passes, per step."""
    wait_seconds: float
    """Mean time in the rest of a step: for the other ranks, and in what all do together."""
    peak_bytes: int
    micro_batch: str
    times_slower: float
    """Than the median of the other ranks, where that makes it slow; else 0."""
    failures: int
    """How often memory ran out on it."""
    failed_at: int
    """In which step last."""
    failed_lately: bool
    """Within the latest steps."""

    @property
    def is_noteworthy(self) -> bool:
        """Slow, or out of memory not long ago."""
        return bool(self.times_slower or self.failed_lately)


def rank_rows(watch: RunWatch) -> list[RankRow]:
    """What is known of each rank; empty for a run of one process, and before its first step."""
    newest = _told(watch.latest)
    steps = [told for told in map(_told, list(watch.curves.recent)[-STEPS:]) if len(told) == len(newest)] or [newest]
    busy = [_mean(steps, rank, "busy_seconds") for rank in range(len(newest))]
    backoffs = [(event.get("failed_rank"), event.get("step")) for event in watch.state.backoffs]
    struck = [(rank, step) for rank, step in backoffs if isinstance(rank, int) and isinstance(step, int)]
    failures, failed_at = Counter(rank for rank, _ in struck), dict(struck)
    return [
        RankRow(
            rank,
            busy[rank],
            max(0.0, _mean(steps, rank, "step_seconds") - busy[rank]),
            int(told["peak_bytes"]),
            f"{told['largest_micro_batch']} × {told['micro_batches']}",
            _times_slower(busy, rank) if len(steps) >= LEAST_STEPS else 0.0,
            failures[rank],
            failed_at.get(rank, 0),
            failures[rank] > 0 and failed_at.get(rank, 0) > watch.step - STEPS,
        )
        for rank, told in enumerate(newest)
    ]


def _told(event: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What the ranks told of a step; empty unless all of it can be shown."""
    told = event.get("ranks") if event is not None else None
    if not isinstance(told, list):
        return []
    whole = all(isinstance(each, dict) and all(_is_number(each.get(name)) for name in FIELDS) for each in told)
    return told if whole else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean(steps: Sequence[list[dict[str, Any]]], rank: int, name: str) -> float:
    return sum(float(told[rank][name]) for told in steps) / len(steps)


def _times_slower(busy: Sequence[float], rank: int) -> float:
    others = median(seconds for other, seconds in enumerate(busy) if other != rank) if len(busy) > 1 else 0.0
    return busy[rank] / others if others > 0 and busy[rank] >= SLOW * others else 0.0


def in_short(watch: RunWatch) -> str:
    """The ranks in a few words: how many, and which to look at."""
    rows = rank_rows(watch)
    slow = ", ".join(str(row.rank) for row in rows if row.times_slower)
    return f"{len(rows)}" + (f"; slow: {slow}" if slow else "")


def ranks(watch: RunWatch, width: int, height: int, draw: Callable[[str], str]) -> list[Content]:
    """A line for each rank under a heading; where there is not room for all, first those that are worth a look."""
    rows = rank_rows(watch)
    if not rows:
        return []
    shown = rows if len(rows) < height else sorted(rows, key=lambda row: (not row.is_noteworthy, row.rank))
    shown = shown[: height - 1] if len(rows) < height else sorted(shown[: height - 2], key=lambda row: row.rank)
    capacity = _capacity(watch)
    bar = max(0, min(12, (width - FIGURES - REMARK) // 2 - 1))
    longest = max(row.busy_seconds for row in rows)
    gap = " " * (bar + 1 if bar else 0)
    heading = f" rank  {'computes':>8}{gap}  {'waits':>7}  {'micro-batch':>11}  {'peak':>9}{gap}"
    lines = [Content.styled(heading, "$muted"), *(_line(row, longest, capacity, bar, width, draw) for row in shown)]
    left_out = len(rows) - len(shown)
    return [*lines, Content.styled(f"  and {left_out} more", "$muted")] if left_out else lines


def _line(
    row: RankRow, longest: float, capacity: int | None, bar: int, width: int, draw: Callable[[str], str]
) -> Content:
    slow, short = bool(row.times_slower), row.failed_lately
    figures = Content.assemble(
        (f" {row.rank:>4}  ", "bold" if row.is_noteworthy else "$muted"),
        (f"{_time(row.busy_seconds):>8}", "bold $caution" if slow else ""),
        *_bar(row.busy_seconds / longest if longest else 0.0, bar, "$caution" if slow else "$info", draw),
        f"  {_time(row.wait_seconds):>7}  {draw(row.micro_batch):>11}  {format_bytes(row.peak_bytes):>9}",
        *_bar(row.peak_bytes / capacity if capacity else 0.0, bar, "$bad" if short else "$info", draw),
    )
    return Content.assemble(figures, *_remarks(row, width - figures.cell_length, draw))


def _remarks(row: RankRow, cells: int, draw: Callable[[str], str]) -> list[tuple[str, str]]:
    """What is remarkable about the rank, in full where there is room."""
    long, brief = [], []
    if row.failures:
        times, style = f", {row.failures} times" if row.failures > 1 else "", "bold $bad" if row.failed_lately else ""
        long.append((f"  ▲ out of memory in step {row.failed_at}{times}", style))
        brief.append((f"  ▲ oom {row.failures} ×", style))
    if row.times_slower:
        long.append((f"  slow, {row.times_slower:.1f} × the others", "bold $caution"))
        brief.append((f"  slow {row.times_slower:.1f} ×", "bold $caution"))
    chosen = long if sum(len(text) for text, _ in long) <= cells else brief
    return [(draw(text), style) for text, style in chosen]


def _bar(share: float, cells: int, style: str, draw: Callable[[str], str]) -> list[tuple[str, str]]:
    if not cells:
        return []
    full = round(cells * min(1.0, share))
    return [(" " + draw("█" * full), style), (draw("░" * (cells - full)), "$muted")]


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else format_duration(seconds)


def _capacity(watch: RunWatch) -> int | None:
    started = (watch.state.running or {}).get("capacity_bytes")
    planned = watch.state.predicted.get("capacity_bytes")
    return next((int(found) for found in (started, planned) if _is_number(found) and found), None)
