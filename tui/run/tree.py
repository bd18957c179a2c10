"""The rows of the Runs screen as a tree: a staged run opens to its stages, a sweep to the runs of its points.

`RunTree` reads the stages of opened runs beside the list of runs, and makes the rows. A filter shows runs without the
tree. Nothing here draws or writes.

Try: `python -m pytest tests/tui/run/test_tree.py`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from textual.content import Content

from engine.journal.compare import best_runs
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.journal.stages import stage_directories, stage_name
from engine.journal.summary import RunSummary
from tui.run.listing import RunEntry, RunList, short_name
from tui.run.table import COLUMNS, STATE_WIDTH, TableColumn, run_row, state_cell, state_of
from tui.theme import glyphs

SWEEP = "sweep:"
"""Prefix of the key of a sweep's row."""

TO_COME = "pending"

WORST_FIRST = ("running", "stopping", "oom", "failed", "stale", "queued", "paused", "stopped", "done")
"""States in order of importance: a sweep has the first of these that one of its runs has."""


@dataclass(frozen=True)
class TreeRow:
    """One row: a run, a stage of a run, or a sweep."""

    key: str
    """The path of the run or stage, or "sweep:ID"; the same from one read to the next."""
    name: str
    entry: RunEntry | None = None
    """The run or stage; None for a sweep, and for a stage that has not begun."""
    depth: int = 0
    is_open: bool | None = None
    """Whether the rows below are shown; None if there are none."""
    members: tuple[RunEntry, ...] = ()
    """The runs of a sweep, in the order of its points."""
    state: str = ""
    """For a stage that has not begun: "pending" or "skipped". Empty for all other rows."""
    parent: str = ""
    """The key of the row above that this one belongs to."""

    @property
    def directory(self) -> RunDirectory | None:
        """The run directory; None for a sweep, and for a stage that has not begun."""
        return self.entry.directory if self.entry is not None else None

    @property
    def summary(self) -> RunSummary | None:
        """The summary of the run, the stage, or all runs of the sweep; None if it was not read yet."""
        return summary_of_sweep(self.members) if self.members else self.entry.summary if self.entry else None

    @property
    def is_sweep(self) -> bool:
        """Whether the row stands for the runs of a sweep."""
        return bool(self.members)


class RunTree:
    """All runs of a list, with the stages of those that are open."""

    def __init__(self, runs: RunList) -> None:
        self.runs = runs
        self._stages = RunList(self._opened_stages)
        self._open: set[str] = set()
        self._made_of: tuple[object, ...] = ()
        self._rows_before: list[TreeRow] = []
        self._often: tuple[int, Counter[str]] | None = None
        """How many runs have a name, and the version of the list of which they were counted."""
        self.sorted_by: TableColumn | None = None
        """The column by which runs and sweeps are sorted; None: newest first."""
        self.largest_first = False
        """Whether the rows are in descending order of that column; without a column, whether the oldest run is first.
        """

    def refresh(self, *, seconds: float) -> None:
        """Read new and changed runs, and stages of opened runs, each for about `seconds`."""
        self.runs.refresh(seconds=seconds)
        self._stages.refresh(seconds=seconds)

    @property
    def unread(self) -> int:
        """The number of runs and stages that were not read yet."""
        return self.runs.unread + self._stages.unread

    def set_open(self, key: str, *, is_open: bool) -> None:
        """Show (`is_open`) or hide the rows below the row with this key."""
        (self._open.add if is_open else self._open.discard)(key)

    def rows(self, matches: Callable[[RunEntry], bool] | None = None) -> list[TreeRow]:
        """Return all rows to show, in a list that is not to be changed; with a filter, one row for each run that
        matches. Without one, the rows of the last call where nothing has changed: a key must not take longer for 3,000
        runs."""
        made_of = (self.runs.version, self._stages.version, frozenset(self._open), self.sorted_by, self.largest_first)
        if matches is None and made_of == self._made_of:
            return self._rows_before
        rows = self._all_rows(matches)
        if matches is None:
            self._made_of, self._rows_before = made_of, rows
        return rows

    def _all_rows(self, matches: Callable[[RunEntry], bool] | None) -> list[TreeRow]:
        if self._often is None or self._often[0] != self.runs.version:
            self._often = self.runs.version, Counter(short_name(entry.directory) for entry in self.runs.entries)
        often = self._often[1]
        return [_told_apart(row, often) for row in self._rows(matches)]

    def _rows(self, matches: Callable[[RunEntry], bool] | None) -> list[TreeRow]:
        if matches is not None:
            return [row for (row,) in self._in_order([[_run_row(each)] for each in self.runs.entries if matches(each)])]
        sweeps = _sweeps(self.runs.entries)
        blocks: list[list[TreeRow]] = []
        shown: set[str] = set()
        for entry in self.runs.entries:
            if entry.sweep not in sweeps:
                blocks.append(list(self._run_rows(entry)))
            elif entry.sweep not in shown:
                shown.add(entry.sweep)
                blocks.append(list(self._sweep_rows(entry.sweep, sweeps[entry.sweep])))
        return [row for block in self._in_order(blocks) for row in block]

    def _in_order(self, blocks: list[list[TreeRow]]) -> list[list[TreeRow]]:
        """Sort runs and sweeps, each with the rows below it, by the chosen column; those without a value come last."""
        if self.sorted_by is None:
            return blocks[::-1] if self.largest_first else blocks
        values = [(_sort_value(block[0], self.sorted_by), block) for block in blocks]
        known = [pair for pair in values if pair[0] is not None]
        known.sort(key=lambda pair: pair[0], reverse=self.largest_first)
        return [block for _, block in known] + [block for value, block in values if value is None]

    def _sweep_rows(self, sweep: str, members: tuple[RunEntry, ...]) -> Iterator[TreeRow]:
        key = SWEEP + sweep
        yield TreeRow(key, f"{key} ({len(members)})", is_open=key in self._open, members=members)
        if key in self._open:
            for entry in members:
                yield from self._run_rows(entry, depth=1, parent=key)

    def _run_rows(self, entry: RunEntry, depth: int = 0, parent: str = "") -> Iterator[TreeRow]:
        row = _run_row(entry, depth=depth, parent=parent)
        if not entry.stages:
            yield row
            return
        is_open = row.key in self._open
        yield replace(row, is_open=is_open)
        if is_open:
            yield from self._stage_rows(entry, row.key, depth + 1)

    def _stage_rows(self, run: RunEntry, parent: str, depth: int) -> Iterator[TreeRow]:
        begun = {stage_name(stage.directory): stage for stage in self._stages.entries
                 if stage.directory.path.parent.parent == run.directory.path}  # fmt: skip
        ends = {stage["name"]: stage["status"] for stage in run.summary.stages} if run.summary is not None else {}
        for name in run.stages:
            if name in begun:
                yield replace(_run_row(begun[name], depth=depth, parent=parent), name=name)
            else:
                state = "skipped" if ends.get(name) == "skipped" else TO_COME
                yield TreeRow(f"{parent}/{name}", name, depth=depth, state=state, parent=parent)

    def _opened_stages(self) -> list[RunDirectory]:
        if not self._open:
            return []
        opened = [entry.directory for entry in self.runs.entries if str(entry.directory.path) in self._open]
        return [stage for run in opened for stage in stage_directories(run)]


def _told_apart(row: TreeRow, often: Mapping[str, int]) -> TreeRow:
    """The row of one of several runs of a name, with what was changed in this one behind the name."""
    changed = row.entry.changed if row.entry is not None and not row.parent and often[row.name] > 1 else ""
    return replace(row, name=f"{row.name} {changed}") if changed else row


def _run_row(entry: RunEntry, depth: int = 0, parent: str = "") -> TreeRow:
    return TreeRow(str(entry.directory.path), short_name(entry.directory), entry, depth, parent=parent)


def _sort_value(row: TreeRow, column: TableColumn) -> Any:
    return column.value(row.summary) if column.value is not None and row.summary is not None else None


def _sweeps(entries: list[RunEntry]) -> dict[str, tuple[RunEntry, ...]]:
    """Map each sweep that has more than one run to its runs, in the order of its points. `entries` must be ordered from
    newest to oldest."""
    found: dict[str, list[RunEntry]] = {}
    for entry in reversed(entries):
        if entry.sweep:
            found.setdefault(entry.sweep, []).append(entry)
    return {sweep: tuple(members) for sweep, members in found.items() if len(members) > 1}


def summary_of_sweep(members: tuple[RunEntry, ...]) -> RunSummary | None:
    """Return one summary for a sweep: that of its best run by checkpoint.best_metric, with the steps, out-of-memory
    errors and time of all runs together. Its state is `running` if any run is running, else the worst of
    the runs' states. None if no run was read."""
    summaries = [entry.summary for entry in members if entry.summary is not None]
    if not summaries:
        return None
    best = [*best_runs(summaries), *(summary for summary in summaries if summary.best), *summaries][0]
    states = {state_of(summary) for summary in summaries}
    longest = [summary.max_steps for summary in summaries]
    return replace(
        best,
        status=next((state for state in WORST_FIRST if state in states), best.status),
        step=sum(summary.step for summary in summaries),
        max_steps=sum(steps for steps in longest if steps) if all(longest) else None,
        backoffs=sum(summary.backoffs for summary in summaries),
        seconds=sum(summary.seconds or 0.0 for summary in summaries),
        total_seconds=sum(summary.total_seconds or 0.0 for summary in summaries),
        stopping=False,
    )


def tree_row(
    row: TreeRow, width: int, ascii_only: bool, *, columns: Sequence[TableColumn] = COLUMNS, marked: bool = False
) -> Content:
    """Draw the row as one line of `width` cells with these columns, indented by its depth, with a symbol where it can
    be opened or closed. `marked` draws the mark of a run that is to be compared."""
    mark = {None: "", False: "▶ ", True: "▼ "}[row.is_open]
    branch = f"{'  ' * (row.depth - 1)}└ " if row.depth else ""
    title = glyphs(branch + mark, ascii_only=ascii_only) + clean(row.name)
    if row.entry is not None:
        own = title if title != short_name(row.entry.directory) else ""
        return run_row(row.entry, width, ascii_only, columns, marked=marked, title=own)
    if row.is_sweep:
        return run_row(row.members[0], width, ascii_only, columns, title=title, of_all=row.summary)
    state = state_cell(row.state, str, ascii_only=ascii_only)
    return Content.assemble(" ", state.pad_right(STATE_WIDTH - state.cell_length), (title, "$muted"))
