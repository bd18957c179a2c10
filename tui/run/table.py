"""A run as one row of a table, and the filter over runs. Pure functions of a `RunEntry`.

Text from run directories (names, models) passes `clean` and is put into `Content`, which reads no markup in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from textual.content import Content

from engine.journal.event_text import clean, format_duration, format_number
from engine.journal.summary import RunSummary
from engine.journal.summary_text import file_problems
from tui.run.listing import RunEntry
from tui.theme import STATES

FIELDS = ("state", "model", "recipe", "profile", "name")
"""The fields that a filter can name: `FIELD:text`."""


class TableColumn(NamedTuple):
    """One column of the table: its title, its width (0: all the width that is left), and the least screen width at
    which it is shown."""

    title: str
    width: int
    from_width: int
    cell: Callable[[RunEntry, RunSummary], str]
    right: bool = False
    value: Callable[[RunSummary], float | str | None] | None = None
    """What rows are sorted by; None for a column by which they are not sorted. None as a value comes last."""
    of_one_run: bool = False
    """Whether the cell of a sweep is empty, because its runs differ."""


def _steps(_entry: RunEntry, summary: RunSummary) -> str:
    return f"{summary.step:,}" + (f"/{summary.max_steps:,}" if summary.max_steps else "")


def _loss(_entry: RunEntry, summary: RunSummary) -> str:
    return format_number(summary.metrics["train_loss"]) if "train_loss" in summary.metrics else ""


def _score(_entry: RunEntry, summary: RunSummary) -> str:
    return format_number(summary.metrics["loss"]) if "loss" in summary.metrics else ""


def _time(_entry: RunEntry, summary: RunSummary) -> str:
    return format_duration(summary.total_seconds) if summary.total_seconds is not None else ""


def _evaluation_loss(summary: RunSummary) -> float | None:
    return summary.metrics.get("loss")


COLUMNS: tuple[TableColumn, ...] = (
    TableColumn("run", 0, 0, lambda entry, _: entry.directory.name),
    TableColumn("step", 13, 50, _steps, right=True, value=lambda summary: summary.step),
    TableColumn("loss", 8, 95, _loss, right=True, value=lambda summary: summary.metrics.get("train_loss")),
    TableColumn("eval", 8, 70, _score, right=True, value=_evaluation_loss),
    TableColumn("ooms", 4, 75, lambda _, summary: str(summary.backoffs or ""), right=True,
                value=lambda summary: summary.backoffs),
    TableColumn("time", 8, 70, _time, right=True, value=lambda summary: summary.total_seconds),
    TableColumn("changed", 20, 120, lambda entry, _: entry.changed, of_one_run=True),
    TableColumn("model", 22, 150, lambda _, summary: summary.model, value=lambda summary: summary.model),
    TableColumn("profile", 10, 170, lambda _, summary: summary.profile, value=lambda summary: summary.profile),
)  # fmt: skip

CHOOSABLE = COLUMNS[1:]
"""The columns that a user can choose; the first, the name, is always shown."""


def chosen_columns(titles: Sequence[str]) -> tuple[TableColumn, ...]:
    """The columns with these titles, in this order, shown at every width that has room for them; all columns, each from
    its own width on, if there are no titles."""
    named = {column.title: column for column in CHOOSABLE}
    chosen = tuple(named[title]._replace(from_width=0) for title in titles)
    return (COLUMNS[0], *chosen) if chosen else COLUMNS


STATE_WIDTH = 11
"""Cells for a glyph, a space and the longest state."""


def state_of(summary: RunSummary) -> str:
    """The status of a run, or `stopping` for a running run that was asked to stop."""
    return "stopping" if summary.status == "running" and summary.stopping else summary.status


def state_cell(state: str, glyphs: Callable[[str], str], *, ascii_only: bool) -> Content:
    """Return the glyph and the word of a run's state, in the state's colour. `glyphs` replaces the glyph by ASCII where
    necessary."""
    shown = STATES.get(state)
    if shown is None:
        return Content(clean(state))
    return Content.styled(f"{shown.letter if ascii_only else shown.glyph} {state}", shown.style)


def table_heading(width: int, columns: Sequence[TableColumn]) -> Content:
    """A line with the titles of the columns."""
    parts = [_fit(column.title, size, column.right) for column, size in _sizes(width, columns)]
    return Content(" " + "state".ljust(STATE_WIDTH) + "  ".join(parts))


def run_row(
    entry: RunEntry, width: int, ascii_only: bool, columns: Sequence[TableColumn] = COLUMNS, *, marked: bool = False,
    title: str = "", of_all: RunSummary | None = None,
) -> Content:  # fmt: skip
    """Draw the run as one line of `width` cells, with those of `columns` for which there is room. `marked` draws a mark
    before it; `title`, if given, replaces the run's name, and `of_all` (such as the summary of a sweep) replaces the
    run's own summary."""
    lead = Content.styled("*" if ascii_only else "◆", "bold $mark") if marked else Content(" ")
    summary = of_all or entry.summary
    problems = "; ".join(file_problems(entry.summary)) if entry.summary is not None and not of_all else ""
    if summary is None or (problems and summary.started is None):
        why = entry.read_error or problems
        word = ("x damaged" if ascii_only else "✗ damaged") if why else "..."
        state = Content.styled(_fit(word, STATE_WIDTH, False), "$muted")
        return Content.assemble(
            lead, state, (title or clean(entry.directory.name)) + (f"  {clean(why)}" if why else "")
        )
    state = state_cell(state_of(summary), str, ascii_only=ascii_only)
    cells = [
        ("" if of_all and column.of_one_run else clean(column.cell(entry, summary)), column, size)
        for column, size in _sizes(width, columns)
    ]
    damaged = f"  {'x' if ascii_only else '✗'} {problems}" if problems else ""
    cells[0] = ((title or cells[0][0]) + damaged, *cells[0][1:])
    parts = [_fit(text, size, column.right) for text, column, size in cells]
    return Content.assemble(lead, state.pad_right(STATE_WIDTH - state.cell_length), "  ".join(parts))


def _sizes(width: int, columns: Sequence[TableColumn]) -> list[tuple[TableColumn, int]]:
    """The columns that are shown at this width, with their widths."""
    there = [column for column in columns if width >= column.from_width]
    fixed = sum(column.width for column in there) + 2 * (len(there) - 1) + STATE_WIDTH + 2
    return [(column, column.width or max(8, width - fixed)) for column in there]


def _fit(text: str, size: int, right: bool) -> str:
    """Cut the text with an ellipsis, or pad it on the right (on the left if `right`, which aligns it right), to exactly
    `size` cells."""
    content = Content(text)
    if content.cell_length > size:
        content = content.truncate(size, ellipsis=True)
    gap = " " * (size - content.cell_length)
    return gap + content.plain if right else content.plain + gap


def matches(entry: RunEntry, wanted: str) -> bool:
    """Whether a run matches every word of the filter `wanted`. A word `field:text` is searched in that field, any other
    word in all fields."""
    return all(_matches_word(entry, word.lower()) for word in wanted.split())


def _matches_word(entry: RunEntry, word: str) -> bool:
    field, colon, text = word.partition(":")
    values = _values(entry)
    if colon and field in FIELDS:
        return text in values[field].lower()
    return any(word in value.lower() for value in values.values())


def _values(entry: RunEntry) -> dict[str, str]:
    summary = entry.summary
    name = entry.directory.name
    if summary is None:
        return dict.fromkeys(FIELDS, "") | {"name": name, "state": "damaged" if entry.read_error else ""}
    return {
        "state": state_of(summary), "model": summary.model, "recipe": summary.recipe, "profile": summary.profile,
        "name": f"{name} {summary.name}",
    }  # fmt: skip
