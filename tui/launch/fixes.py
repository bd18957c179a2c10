"""Suggested changes as lines of text: the margin and speed each gives, the keys it changes, and the reasons.

Pure functions of `engine.budget.advise.search`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from textual.content import Content

from engine.journal.event_text import speed_text
from tui.launch.budget_bar import decimal_bytes
from tui.launch.fields import format_value

if TYPE_CHECKING:
    from engine.budget.advise.search import Advice, Suggestion


class FixLine(NamedTuple):
    """A line of text and the suggestion that it describes; None for a heading."""

    content: Content
    suggestion: Suggestion | None


def fix_lines(advice: Advice, width: int) -> list[FixLine]:
    """Format the advice as lines, wrapped at `width` cells: headings, and the lines of every suggestion."""
    return [
        FixLine(part, suggestion) for content, suggestion in _lines(advice) for part in _wrapped(content, width - 1)
    ]


def _wrapped(content: Content, width: int) -> Iterator[Content]:
    """Wrap the content into lines; all lines but the first are indented by two cells."""
    first, *rest = content.wrap(max(16, width))
    yield first
    if rest:
        after = content[len(first.plain) :]
        yield from (Content.assemble("  ", line) for line in _stripped(after).wrap(max(16, width - 2)))


def _stripped(content: Content) -> Content:
    return content[len(content.plain) - len(content.plain.lstrip()) :]


def _lines(advice: Advice) -> Iterator[tuple[Content, Suggestion | None]]:
    if advice.plan.verdict == "fits":
        heading = "It fits. Uses for the memory left:" if advice.room else "It fits; no larger setting does."
        yield Content.styled(heading, "$muted"), None
    elif not advice.suggestions:
        heading = "No set of changes makes it fit: a smaller model or a larger device is needed."
        yield Content.styled(heading, "$bad"), None
    for number, suggestion in enumerate([*advice.suggestions, *advice.room], 1):
        yield from ((content, suggestion) for content in _suggestion(number, suggestion))


def _suggestion(number: int, suggestion: Suggestion) -> Iterator[Content]:
    plan = suggestion.plan
    speed = speed_text(suggestion.slower_percent)
    arithmetic = ", changes arithmetic" if suggestion.changes_arithmetic else ""
    yield Content.assemble(
        (f"{number} ", "bold $info"),
        (f"{decimal_bytes(plan.margin_bytes)} left", "bold"),
        (", tight" if plan.is_tight else "", "bold $caution"),
        f", micro-batch {plan.micro_batch}, {speed}{arithmetic}",
    )
    if suggestion.changes_learning:
        yield Content.styled("  changes the training result", "bold $caution")
    for key, (before, after) in suggestion.changes.items():
        was = f"  was {format_value(before) or 'not set'}"
        yield Content.assemble(f"  {key} = ", (format_value(after), "bold"), (was, "$muted"))
    for lever in suggestion.levers:
        yield Content.styled(f"  {lever.note}", "$muted")
