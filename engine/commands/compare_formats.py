"""The table of `tunedeck compare` for a spreadsheet (CSV, exact values) and for a report (Markdown)."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from engine.journal.compare import COST_KEYS, CompareRow, Comparison, comparison_rows, format_setting
from engine.journal.event_text import clean
from engine.journal.score_groups import Gain, Gains

FORMULA = ("=", "+", "-", "@")
"""Beginnings of a text that a spreadsheet takes for a formula."""
SYNTAX = re.compile(r"[\\`*_\[\]<>|]")
"""What Markdown does not show as it is."""


class ValueRow(NamedTuple):
    section: str
    name: str
    values: Sequence[Any]
    """One for each run, None for a run without one."""


def comparison_csv(found: Comparison, metric: str | None, gained: Gains | None) -> str:
    """A header (section, name and the runs), then a row for each value, under the names that --json has."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["section", "name", *map(_cell, found.runs)])
    for row in _value_rows(found, metric, gained):
        writer.writerow([_cell(row.section), _cell(row.name), *map(_cell, row.values)])
    return text.getvalue()


def comparison_markdown(found: Comparison, metric: str | None, gained: Gains | None) -> str:
    """The table as on a terminal: headings and the best values are bold."""
    rows = [CompareRow("status", found.statuses), *comparison_rows(found, metric)]
    if gained is not None:
        rows += _gain_rows(gained, found.runs)
    lines = [_line(["", *map(_escaped, found.runs)]), _line(["---", *["---:"] * len(found.runs)])]
    for row in rows:
        if not row.cells:
            lines.append(_line([f"**{_escaped(row.label)}**", *[""] * len(found.runs)]))
            continue
        best = row.best or [False] * len(row.cells)
        cells = [
            f"**{_escaped(cell)}**" if wins else _escaped(cell) for cell, wins in zip(row.cells, best, strict=True)
        ]
        lines.append(_line([_escaped(row.label), *cells]))
    sentences = [each for each in (found.sentence, gained.sentence if gained else "") if each]
    return "\n".join([*lines, *(f"\n{_escaped(each)}" for each in sentences)]) + "\n"


def _value_rows(found: Comparison, metric: str | None, gained: Gains | None) -> Iterator[ValueRow]:
    yield ValueRow("run", "status", found.statuses)
    for key, values in found.settings.items():
        yield ValueRow("settings", key, [None if value is None else format_setting(value) for value in values])
    for group in found.groups:
        section = f"scored on {group.title}"
        yield ValueRow(section, "step", group.steps)
        yield from (ValueRow(section, name, values) for name, values in group.metrics.items())
        if metric is None:
            continue
        for step in sorted({step for one in group.checkpoints for step in one}):
            values = [one.get(step, {}).get(metric) for one in group.checkpoints]
            yield ValueRow(section, f"{metric} at step {step}", values)
    for key, scores in found.scores.items():
        yield ValueRow("training" if key in COST_KEYS else "evaluation while training", key, scores)
    if gained is not None:
        section, rows = f"gain over {gained.against}", [_gain_of(gained, run) for run in found.runs]
        for name in ("gain", "low", "high"):
            yield ValueRow(section, name, [None if row is None else getattr(row, name) for row in rows])


def _gain_rows(gained: Gains, runs: Sequence[str]) -> Iterator[CompareRow]:
    yield CompareRow(f"gain over {gained.against} by {gained.metric}")
    rows = [_gain_of(gained, run) for run in runs]
    yield CompareRow("gain", ["-" if row is None else f"{row.gain:+.4g}" for row in rows])
    yield CompareRow("95 % interval", ["-" if row is None else row.interval for row in rows])


def _gain_of(gained: Gains, run: str) -> Gain | None:
    return next((row for row in gained.rows if row.run == run), None)


def _cell(value: Any) -> Any:
    """A text of someone else's run is no formula, and stays on its line."""
    if not isinstance(value, str):
        return value
    return f"'{clean(value)}" if clean(value).startswith(FORMULA) else clean(value)


def _escaped(text: str) -> str:
    return SYNTAX.sub(lambda found: f"\\{found[0]}", clean(text))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
