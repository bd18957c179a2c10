"""The ranks of a run on the Run screen, one a line: functions from a `RunWatch` to lines.

The event of each step has the figures of every rank. All ranks wait for a rank that computes for much longer
than the others, and all repeat the step when one runs out of memory. Both are noted in words beside the figures.

Try: `[line.plain for line in rank_lines(watch, 80, 10, str)]`
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

SLOW_FACTOR = 1.5
"""A rank is slow when it computes this many times as long as the median of the others."""

RECENT_STEPS = 20
"""Number of latest steps over which means are taken, so that a single slow step does not make a rank slow."""

MIN_STEPS = 3
"""With fewer steps than this no rank is called slow."""

FIELDS = ("busy_seconds", "step_seconds", "peak_bytes", "micro_batches", "largest_micro_batch")
"""The fields of a rank's report that are shown."""

FIGURES_WIDTH = 48
"""Cells of a line's figures, without bars."""

REMARK_WIDTH = 16
"""Cells reserved for a remark; bars are drawn only in the cells beyond."""


@dataclass(frozen=True)
class RankSummary:
    """The figures of one rank, averaged over the latest steps or taken from the last one."""

    rank: int
    busy_seconds: float
    """Mean time in forward and backward passes, per step."""
    wait_seconds: float
    """Mean time in the rest of a step: waiting for other ranks, and in collectives."""
    peak_bytes: int
    micro_batch: str
    times_slower: float
    """The rank's computing time divided by the median of the other ranks, if the rank is slow; else 0."""
    failures: int
    """How often the rank ran out of memory."""
    failed_at: int
    """The step in which the rank last ran out of memory; 0 if it never did."""
    failed_lately: bool
    """Whether the rank ran out of memory within the latest RECENT_STEPS steps."""

    @property
    def is_noteworthy(self) -> bool:
        """Whether the rank is slow, or recently ran out of memory."""
        return bool(self.times_slower or self.failed_lately)


def rank_summaries(watch: RunWatch) -> list[RankSummary]:
    """A summary of each rank; empty for a run with a single process, and before the first step."""
    newest = _rank_reports(watch.latest)
    reports = map(_rank_reports, list(watch.curves.recent)[-RECENT_STEPS:])
    steps = [report for report in reports if len(report) == len(newest)] or [newest]
    busy = [_mean(steps, rank, "busy_seconds") for rank in range(len(newest))]
    backoffs = [(event.get("failed_rank"), event.get("step")) for event in watch.state.backoffs]
    failed = [(rank, step) for rank, step in backoffs if isinstance(rank, int) and isinstance(step, int)]
    failures, failed_at = Counter(rank for rank, _ in failed), dict(failed)
    return [
        RankSummary(
            rank,
            busy[rank],
            max(0.0, _mean(steps, rank, "step_seconds") - busy[rank]),
            int(report["peak_bytes"]),
            f"{report['largest_micro_batch']} × {report['micro_batches']}",
            _times_slower(busy, rank) if len(steps) >= MIN_STEPS else 0.0,
            failures[rank],
            failed_at.get(rank, 0),
            failures[rank] > 0 and failed_at.get(rank, 0) > watch.step - RECENT_STEPS,
        )
        for rank, report in enumerate(newest)
    ]


def _rank_reports(event: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The reports of all ranks in a step's event; empty unless the report of every rank has all FIELDS."""
    reports = event.get("ranks") if event is not None else None
    if not isinstance(reports, list):
        return []
    complete = all(isinstance(each, dict) and all(_is_number(each.get(name)) for name in FIELDS) for each in reports)
    return reports if complete else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean(steps: Sequence[list[dict[str, Any]]], rank: int, name: str) -> float:
    return sum(float(report[rank][name]) for report in steps) / len(steps)


def _times_slower(busy: Sequence[float], rank: int) -> float:
    others = median(seconds for other, seconds in enumerate(busy) if other != rank) if len(busy) > 1 else 0.0
    return busy[rank] / others if others > 0 and busy[rank] >= SLOW_FACTOR * others else 0.0


def ranks_in_brief(watch: RunWatch) -> str:
    """A text with the number of ranks and the numbers of the slow ranks."""
    rows = rank_summaries(watch)
    slow = ", ".join(str(row.rank) for row in rows if row.times_slower)
    return f"{len(rows)}" + (f"; slow: {slow}" if slow else "")


def rank_lines(watch: RunWatch, width: int, height: int, glyphs: Callable[[str], str]) -> list[Content]:
    """Return a heading and a line for each rank, in at most `height` lines. If there is no room for all ranks, slow
    ranks and those that ran out of memory are chosen first. `glyphs` replaces the console's glyphs by ASCII characters.
    """
    rows = rank_summaries(watch)
    if not rows:
        return []
    shown = rows if len(rows) < height else sorted(rows, key=lambda row: (not row.is_noteworthy, row.rank))
    shown = shown[: height - 1] if len(rows) < height else sorted(shown[: height - 2], key=lambda row: row.rank)
    capacity = _capacity(watch)
    bar = max(0, min(12, (width - FIGURES_WIDTH - REMARK_WIDTH) // 2 - 1))
    longest = max(row.busy_seconds for row in rows)
    gap = " " * (bar + 1 if bar else 0)
    heading = f" rank  {'computes':>8}{gap}  {'waits':>7}  {'micro-batch':>11}  {'peak':>9}{gap}"
    lines = [Content.styled(heading, "$muted"), *(_line(row, longest, capacity, bar, width, glyphs) for row in shown)]
    left_out = len(rows) - len(shown)
    return [*lines, Content.styled(f"  and {left_out} more", "$muted")] if left_out else lines


def _line(
    row: RankSummary, longest: float, capacity: int | None, bar: int, width: int, glyphs: Callable[[str], str]
) -> Content:
    slow, short = bool(row.times_slower), row.failed_lately
    figures = Content.assemble(
        (f" {row.rank:>4}  ", "bold" if row.is_noteworthy else "$muted"),
        (f"{_time(row.busy_seconds):>8}", "bold $caution" if slow else ""),
        *_bar(row.busy_seconds / longest if longest else 0.0, bar, "$caution" if slow else "$info", glyphs),
        f"  {_time(row.wait_seconds):>7}  {glyphs(row.micro_batch):>11}  {format_bytes(row.peak_bytes):>9}",
        *_bar(row.peak_bytes / capacity if capacity else 0.0, bar, "$bad" if short else "$info", glyphs),
    )
    return Content.assemble(figures, *_remarks(row, width - figures.cell_length, glyphs))


def _remarks(row: RankSummary, cells: int, glyphs: Callable[[str], str]) -> list[tuple[str, str]]:
    """Return (text, style) of each remark on a rank that is slow or ran out of memory, abbreviated to `cells` cells if
    necessary."""
    long, brief = [], []
    if row.failures:
        times, style = f", {row.failures} times" if row.failures > 1 else "", "bold $bad" if row.failed_lately else ""
        long.append((f"  ▲ out of memory in step {row.failed_at}{times}", style))
        brief.append((f"  ▲ oom {row.failures} ×", style))
    if row.times_slower:
        long.append((f"  slow, {row.times_slower:.1f} × the others", "bold $caution"))
        brief.append((f"  slow {row.times_slower:.1f} ×", "bold $caution"))
    chosen = long if sum(len(text) for text, _ in long) <= cells else brief
    return [(glyphs(text), style) for text, style in chosen]


def _bar(share: float, cells: int, style: str, glyphs: Callable[[str], str]) -> list[tuple[str, str]]:
    if not cells:
        return []
    full = round(cells * min(1.0, share))
    return [(" " + glyphs("█" * full), style), (glyphs("░" * (cells - full)), "$muted")]


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else format_duration(seconds)


def _capacity(watch: RunWatch) -> int | None:
    started = (watch.state.running or {}).get("capacity_bytes")
    planned = watch.state.predicted.get("capacity_bytes")
    return next((int(found) for found in (started, planned) if _is_number(found) and found), None)
