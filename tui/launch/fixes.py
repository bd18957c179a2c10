"""Suggested changes as lines of text: what each changes, the memory left, the time, what it learns.

Pure functions of `engine.budget.advise.search`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from textual.content import Content

from engine.config.files.text import visible
from engine.journal.event_text import speed_text
from tui.launch.budget_bar import decimal_bytes
from tui.launch.fields import format_value

if TYPE_CHECKING:
    from engine.budget.advise.search import Advice, Suggestion

LEFT_WIDTH, TIME_WIDTH, RESULT_WIDTH = 16, 20, 16
"""Cells of the columns after the changes: "112.25 GiB left", "about 100 % slower", "other rounding"."""

SHORT_TIME_WIDTH = 14
"""The same where lines are narrow: "100 % slower"."""

NARROW = 100
"""Cells below which lines are narrow."""


NARROWEST = 76
"""Cells below which the time is left out; `fix_notes` has it."""


class FixLine(NamedTuple):
    """A line of text and the suggestion that it describes; None for a heading."""

    content: Content
    suggestion: Suggestion | None


def fix_lines(advice: Advice, width: int) -> list[FixLine]:
    """The advice as lines of `width` cells: a heading where there is nothing to make fit, and a line for each
    suggestion."""
    heading = _heading(advice)
    lines = [FixLine(part, None) for part in heading.wrap(max(16, width))] if heading is not None else []
    for number, suggestion in enumerate([*advice.suggestions, *advice.room], 1):
        lines += [FixLine(part, suggestion) for part in _lines(number, suggestion, width - 1)]
    return lines


def _heading(advice: Advice) -> Content | None:
    if advice.plan.verdict == "fits":
        text = (
            "It fits. Settings that use the remaining memory:"
            if advice.room
            else "It fits; no setting uses the remaining memory."
        )
        return Content.styled(text, "$muted")
    if advice.suggestions:
        return None
    return Content.styled("No combination of changes makes it fit: use a smaller model or a larger device.", "$bad")


def _lines(number: int, suggestion: Suggestion, width: int) -> list[Content]:
    """Number, changes, memory left, time, result. Where the changes are too long, keys lose their tables, then switches
    their values; what still has no room goes on in a second line."""
    narrow = width < NARROW
    speed, rest = speed_text(suggestion.slower_percent), ", tight" if suggestion.plan.is_tight else " left"
    figures = [
        f"{decimal_bytes(suggestion.plan.margin_bytes)}{rest}".rjust(LEFT_WIDTH),
        speed.removeprefix("about ").rjust(SHORT_TIME_WIDTH) if narrow else speed.rjust(TIME_WIDTH),
        result_words(suggestion).rjust(RESULT_WIDTH),
    ]
    if width < NARROWEST:
        del figures[1]
    room = max(12, width - 2 - sum(map(len, figures)))
    texts = _changes_texts(suggestion)
    text = next((each for each in texts if len(each) <= room), texts[-1])
    change = Content.styled(text, "bold").wrap(room)[0].rstrip()
    more = Content.styled(text[len(change.plain) :].strip(), "bold").wrap(width - 2) if len(text) > room else []
    left, result = (
        "$caution" if suggestion.plan.is_tight else "",
        "$caution" if suggestion.changes_learning else "$good",
    )
    styles = (left, *[""] * (len(figures) - 2), result)
    first = Content.assemble(
        (f"{number} ", "$muted"), change, " " * (room - change.cell_length),
        *zip(figures, styles, strict=True),
    )  # fmt: skip
    return [first, *(Content.assemble("  ", line) for line in more)]


def result_words(suggestion: Suggestion) -> str:
    """Whether the run learns the same, or the same but for the precision of its numbers."""
    if suggestion.changes_learning:
        return "other result"
    return "other rounding" if suggestion.changes_arithmetic else "same result"


def _changes_texts(suggestion: Suggestion) -> list[str]:
    """The changes in full, with the last parts of their keys, and also without the values of switches that are on."""
    learned = {key for lever in suggestion.levers if lever.changes_learning for key in lever.keys}
    ordered = sorted(suggestion.changes, key=lambda key: key not in learned)  # these are not what is cut
    changes = [(key, format_value(suggestion.changes[key][1]) or "not set") for key in ordered]
    short = [(key.rpartition(".")[2], value) for key, value in changes]
    return [
        visible(", ".join(f"{key} = {value}" for key, value in changes)),
        visible(", ".join(f"{key} = {value}" for key, value in short)),
        visible(", ".join(key if value == "true" else f"{key} = {value}" for key, value in short)),
    ]


def fix_notes(suggestion: Suggestion) -> str:
    """All changes of a suggestion with the values before, and why each helps, as one sentence."""
    changes = [
        f"{key} = {format_value(after) or 'not set'} (was {format_value(before) or 'not set'})"
        for key, (before, after) in suggestion.changes.items()
    ]
    parts = [
        f"micro-batch {suggestion.plan.micro_batch}",
        speed_text(suggestion.slower_percent),
        *(lever.note for lever in suggestion.levers),
    ]
    parts += ["changes arithmetic"] if suggestion.changes_arithmetic else []
    parts += ["the memory left is smaller than the error of the plan"] if suggestion.plan.is_tight else []
    return visible("; ".join([", ".join(changes), *parts]))
