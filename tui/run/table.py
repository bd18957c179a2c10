"""A run as one row of a table, and the filter over runs. Pure functions of a `RunEntry`.

Text from run directories (names, models) passes `clean` and is put into `Content`, which reads no markup in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from rich.cells import cell_len
from textual.content import Content

from engine.journal.event_text import clean, format_duration, format_number, on_one_line
from engine.journal.index import DIRECTORY_NAME
from engine.journal.summary import RunSummary
from engine.journal.summary_text import file_problems
from tui.run.listing import RunEntry, short_name
from tui.theme import STATES, glyphs

EIGHTHS = "▁▂▃▄▅▆▇█"

ASKED_FOR = "asked for"
"""The reason that the engine records when a run ended at the user's request; not shown, since the user knows it."""

FIELDS = ("state", "model", "recipe", "profile", "name", "tag", "note")
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


def _age(entry: RunEntry, summary: RunSummary) -> str:
    """How long ago the run was created, by the time in its directory's name, else its first event."""
    found = DIRECTORY_NAME.match(entry.directory.name)
    try:
        if found:
            made = datetime.strptime(found[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        else:
            made = datetime.fromisoformat(str(summary.started))
        return age_text((datetime.now(UTC) - made).total_seconds())
    except (ValueError, TypeError):  # another name, and no event with a time
        return ""


def age_text(seconds: float) -> str:
    """An age in one unit: "now" below a minute, then 5 m, 3 h, 2 d, 6 w, 1 y."""
    for unit, size in (("y", 365 * 86400), ("w", 14 * 86400), ("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // (7 * 86400 if unit == 'w' else size):.0f} {unit}"
    return "now"


CURVE_CELLS = 10


def _curve(_entry: RunEntry, summary: RunSummary) -> str:
    """The training loss as bars, on a logarithmic scale where it spans more than a decade."""
    losses = summary.losses
    if len(losses) < 3:
        return ""
    cells = min(CURVE_CELLS, len(losses))
    edges = [len(losses) * cell // cells for cell in range(cells + 1)]
    means = [sum(losses[low:high]) / (high - low) for low, high in pairwise(edges)]
    if min(means) > 0 and max(means) > 10 * min(means):
        means = [math.log(mean) for mean in means]
    low, span = min(means), max(means) - min(means)
    return "".join(EIGHTHS[round(7 * (mean - low) / span) if span else 0] for mean in means)


COLUMNS: tuple[TableColumn, ...] = (
    TableColumn("run", 0, 0, lambda entry, _: short_name(entry.directory)),
    TableColumn("age", 5, 40, _age, right=True, value=lambda summary: summary.started, of_one_run=True),
    TableColumn("step", 13, 50, _steps, right=True, value=lambda summary: summary.step),
    TableColumn("loss", 8, 95, _loss, right=True, value=lambda summary: summary.metrics.get("train_loss")),
    TableColumn("curve", CURVE_CELLS, 110, _curve, of_one_run=True),
    TableColumn("eval", 8, 70, _score, right=True, value=_evaluation_loss),
    TableColumn("ooms", 4, 90, lambda _, summary: str(summary.backoffs or ""), right=True,
                value=lambda summary: summary.backoffs),
    TableColumn("time", 8, 70, _time, right=True, value=lambda summary: summary.total_seconds),
    TableColumn("tags", 14, 130, lambda entry, _: " ".join(entry.labels.tags), of_one_run=True),
    TableColumn("changed", 20, 140, lambda entry, _: entry.changed, of_one_run=True),
    TableColumn("note", 24, 180, lambda entry, _: entry.labels.note, of_one_run=True),
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

MOST_DETAILS = 3
"""Lines for what has no column, of the run under the cursor."""
"""Cells for a glyph, a space and the longest state."""


def state_of(summary: RunSummary) -> str:
    """The status of a run, or `stopping` for a running run that was asked to stop."""
    return "stopping" if summary.status == "running" and summary.stopping else summary.status


def state_cell(state: str, to_ascii: Callable[[str], str], *, ascii_only: bool) -> Content:
    """Return the glyph and the word of a run's state, in the state's colour. `to_ascii` replaces the glyph by
    ASCII where necessary."""
    shown = STATES.get(state)
    if shown is None:
        return Content(clean(state))
    return Content.styled(f"{shown.letter if ascii_only else shown.glyph} {state}", shown.style)


def table_heading(
    width: int, columns: Sequence[TableColumn], *, sorted_by: TableColumn | None = None, arrow: str = ""
) -> Content:
    """A line with the titles of the columns; `arrow` stands at the one that the rows are `sorted_by`."""
    titles = [(f"{column.title}{arrow if column is sorted_by else ''}", size, column.right)
              for column, size in _sizes(width, columns)]  # fmt: skip
    parts = [_fit(*title) for title in titles]
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
            lead, state, (title or clean(short_name(entry.directory))) + (f"  {clean(why)}" if why else "")
        )
    state = state_cell(state_of(summary), str, ascii_only=ascii_only)
    cells = [
        ("" if of_all and column.of_one_run else clean(column.cell(entry, summary)), column, size)
        for column, size in _sizes(width, columns)
    ]
    damaged = f"  {'x' if ascii_only else '✗'} {problems}" if problems else ""
    cells[0] = ((title or cells[0][0]) + damaged, *cells[0][1:])
    cells[0] = (_middle(cells[0][0], cells[0][2], "~" if ascii_only else "…"), *cells[0][1:])
    parts = [
        _fit(glyphs(text, ascii_only=ascii_only) if column.title == "curve" else text, size, column.right)
        for text, column, size in cells
    ]
    return Content.assemble(lead, state.pad_right(STATE_WIDTH - state.cell_length), "  ".join(parts))


def _sizes(width: int, columns: Sequence[TableColumn]) -> list[tuple[TableColumn, int]]:
    """The columns that are shown at this width, with their widths."""
    there = [column for column in columns if width >= column.from_width]
    fixed = sum(column.width for column in there) + 2 * (len(there) - 1) + STATE_WIDTH + 2
    return [(column, column.width or max(8, width - fixed)) for column in there]


def _middle(text: str, size: int, ellipsis: str) -> str:
    """Cut the middle of a name that is longer than `size` cells: beginning and end tell runs apart."""
    if cell_len(text) <= size or size < 8:
        return text
    end = (size - 1) // 2
    return text[: size - 1 - end] + ellipsis + text[-end:]


def _fit(text: str, size: int, right: bool) -> str:
    """Cut the text with an ellipsis, or pad it on the right (on the left if `right`, which aligns it right), to exactly
    `size` cells."""
    content = Content(text)
    if content.cell_length > size:
        content = content.truncate(size, ellipsis=True)
    gap = " " * (size - content.cell_length)
    return gap + content.plain if right else content.plain + gap


def matcher(wanted: str) -> Callable[[RunEntry], bool]:
    """A test whether a run matches every word of the filter `wanted`. A word `field:text` is searched in that field,
    any other word in all fields."""
    words: list[tuple[str, str]] = []
    for word in wanted.lower().split():
        field, colon, text = word.partition(":")
        words.append((field, text) if colon and field in FIELDS else ("", word))

    def matches(entry: RunEntry) -> bool:
        fields = _searched(entry)
        return all(text in fields[field] for field, text in words)

    return matches


def _searched(entry: RunEntry) -> dict[str, str]:
    """The fields of a run in small letters, and "" for all of them, made once for each of its summaries: a letter typed
    searches all runs."""
    kept = entry.searched
    if kept is None or kept[0] is not entry.summary or kept[1] is not entry.labels or entry.summary is None:
        fields = {name: value.lower() for name, value in _values(entry).items()}
        fields[""] = "\0".join(fields.values())
        kept = entry.searched = (entry.summary, entry.labels, fields)
    return kept[2]


def _values(entry: RunEntry) -> dict[str, str]:
    summary = entry.summary
    name = entry.directory.name
    if summary is None:
        return dict.fromkeys(FIELDS, "") | {"name": name, "state": "damaged" if entry.read_error else ""}
    return {
        "state": state_of(summary), "model": summary.model, "recipe": summary.recipe, "profile": summary.profile,
        "name": f"{name} {summary.name}", "tag": " ".join(entry.labels.tags), "note": entry.labels.note,
    }  # fmt: skip


def detail_lines(entry: RunEntry, width: int) -> list[Content]:
    """Lines about a run, of `width` cells: its directory's name, recipe and profile; then in one to MOST_DETAILS lines
    tags and note, the changed settings, and why it ended."""
    summary = entry.summary
    if summary is None:
        return [
            Content.assemble(" ", (clean(entry.directory.name), "bold")),
            Content.styled(f" {entry.read_error}", "$bad"),
        ]
    first = Content.assemble(
        " ", (clean(entry.directory.name), "bold"),
        (f"   {clean(summary.recipe)} on {clean(summary.profile)}, {clean(summary.model)}", "$muted"),
    )  # fmt: skip
    tags = " ".join(f"#{clean(tag)}" for tag in entry.labels.tags)
    why = summary.last_error or ("" if summary.reason == ASKED_FOR else summary.reason)
    parts = [
        (tags, "$mark"),
        (clean(entry.labels.note), ""),
        (clean(entry.changed), "$info"),
        (on_one_line(why or ""), "$bad"),
    ]
    second = [Content.assemble((text, style), "   ") for text, style in parts if text]
    more = Content.assemble(*second).wrap(max(10, width - 2))
    if len(more) > MOST_DETAILS:
        more[MOST_DETAILS - 1] = Content.assemble(more[MOST_DETAILS - 1].rstrip().truncate(width - 3), "…")
    return [first, *(Content.assemble(" ", line) for line in more[:MOST_DETAILS] or [Content("")])]
