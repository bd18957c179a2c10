"""A run as one row of a list, and whether a filter lets it through. Pure functions of what is known of the run.

Text from run directories (names, models) passes `clean`, and is put into `Content`, which never reads it as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from textual.content import Content

from engine.journal.event_text import clean, format_duration, format_number
from engine.journal.summary import RunSummary
from tui.run.listing import Entry
from tui.theme import STATES

FIELDS = ("state", "model", "recipe", "profile", "name")
"""What may stand before a colon in a filter."""


class Column(NamedTuple):
    """One column: its title, its width, and from which width of the screen on it is there. Width 0 takes the rest."""

    title: str
    width: int
    from_width: int
    cell: Callable[[Entry, RunSummary], str]
    right: bool = False


def _steps(_entry: Entry, summary: RunSummary) -> str:
    return f"{summary.step:,}" + (f"/{summary.max_steps:,}" if summary.max_steps else "")


def _loss(_entry: Entry, summary: RunSummary) -> str:
    return format_number(summary.metrics["train_loss"]) if "train_loss" in summary.metrics else ""


def _score(_entry: Entry, summary: RunSummary) -> str:
    return format_number(summary.metrics["loss"]) if "loss" in summary.metrics else ""


def _time(_entry: Entry, summary: RunSummary) -> str:
    return format_duration(summary.seconds) if summary.seconds is not None else ""


COLUMNS: tuple[Column, ...] = (
    Column("run", 0, 0, lambda entry, _: entry.directory.name),
    Column("step", 13, 50, _steps, right=True),
    Column("loss", 8, 70, _loss, right=True),
    Column("eval", 8, 90, _score, right=True),
    Column("ooms", 5, 110, lambda _, summary: str(summary.backoffs or ""), right=True),
    Column("time", 8, 100, _time, right=True),
    Column("model", 22, 110, lambda _, summary: summary.model),
    Column("profile", 10, 140, lambda _, summary: summary.profile),
)

STATE_WIDTH = 11
"""Glyph, space and the longest word of the vocabulary."""


def state_of(summary: RunSummary) -> str:
    """The status, or `stopping`."""
    return "stopping" if summary.status == "running" and summary.stopping else summary.status


def state_cell(state: str, draw: Callable[[str], str], *, ascii_only: bool) -> Content:
    """Glyph and word in the state's colour."""
    shown = STATES.get(state)
    if shown is None:
        return Content(clean(state))
    return Content.styled(f"{shown.letter if ascii_only else shown.glyph} {state}", shown.style)


def heading(width: int, columns: Sequence[Column]) -> Content:
    """The titles over the columns."""
    parts = [_fit(column.title, size, column.right) for column, size in _sizes(width, columns)]
    return Content(" " + "state".ljust(STATE_WIDTH) + "  ".join(parts))


def row(
    entry: Entry, width: int, ascii_only: bool, columns: Sequence[Column] = COLUMNS, *, marked: bool = False
) -> Content:
    """The run's line at this width."""
    lead = Content.styled("*" if ascii_only else "◆", "bold $mark") if marked else Content(" ")
    summary = entry.summary
    if summary is None:
        said = ("x damaged" if ascii_only else "✗ damaged") if entry.trouble else "..."
        state = Content.styled(_fit(said, STATE_WIDTH, False), "$muted")
        rest = clean(entry.directory.name) + (f"  {clean(entry.trouble)}" if entry.trouble else "")
        return Content.assemble(lead, state, rest)
    state = state_cell(state_of(summary), str, ascii_only=ascii_only)
    parts = [_fit(clean(column.cell(entry, summary)), size, column.right) for column, size in _sizes(width, columns)]
    return Content.assemble(lead, state.pad_right(STATE_WIDTH - state.cell_length), "  ".join(parts))


def _sizes(width: int, columns: Sequence[Column]) -> list[tuple[Column, int]]:
    """The columns that this width has room for, with their widths."""
    there = [column for column in columns if width >= column.from_width]
    fixed = sum(column.width for column in there) + 2 * (len(there) - 1) + STATE_WIDTH + 2
    return [(column, column.width or max(8, width - fixed)) for column in there]


def _fit(text: str, size: int, right: bool) -> str:
    """The text in exactly `size` cells, cut where it is longer. Names of runs are told apart by their ends."""
    content = Content(text)
    if content.cell_length > size:
        content = content.truncate(size, ellipsis=True)
    gap = " " * (size - content.cell_length)
    return gap + content.plain if right else content.plain + gap


def matches(entry: Entry, wanted: str) -> bool:
    """Whether every word of the filter holds: `field:text` in that field, any other word anywhere."""
    return all(_holds(entry, word.lower()) for word in wanted.split())


def _holds(entry: Entry, word: str) -> bool:
    field, colon, text = word.partition(":")
    values = _values(entry)
    if colon and field in FIELDS:
        return text in values[field].lower()
    return any(word in value.lower() for value in values.values())


def _values(entry: Entry) -> dict[str, str]:
    summary = entry.summary
    name = entry.directory.name
    if summary is None:
        return dict.fromkeys(FIELDS, "") | {"name": name, "state": "damaged" if entry.trouble else ""}
    return {
        "state": state_of(summary), "model": summary.model, "recipe": summary.recipe, "profile": summary.profile,
        "name": f"{name} {summary.name}",
    }  # fmt: skip


def ago(then: str | None, now: datetime | None = None) -> str:
    """How long ago an ISO time was, in words; empty for none."""
    if not then:
        return ""
    seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(then)).total_seconds()
    return f"{format_duration(max(0.0, seconds))} ago"
