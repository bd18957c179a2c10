"""Ranked changes as lines: what each costs and gives, which keys it moves, and why. Pure functions of the advice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from textual.content import Content

from engine.budget.advise.fit import Advice, Suggestion
from tui.launch.budget_bar import size
from tui.launch.fields import as_typed


class FixLine(NamedTuple):
    """A line, and the suggestion it belongs to (None for a heading)."""

    content: Content
    suggestion: Suggestion | None


def fix_lines(advice: Advice, width: int) -> list[FixLine]:
    """Every suggestion with its changes and its reasons."""
    return [
        FixLine(part, suggestion) for content, suggestion in _lines(advice) for part in _wrapped(content, width - 1)
    ]


def _wrapped(content: Content, width: int) -> Iterator[Content]:
    """The content in lines, those after the first indented like what belongs to a number."""
    first, *rest = content.wrap(max(16, width))
    yield first
    if rest:
        after = content[len(first.plain) :]
        yield from (Content.assemble("  ", line) for line in _stripped(after).wrap(max(16, width - 2)))


def _stripped(content: Content) -> Content:
    return content[len(content.plain) - len(content.plain.lstrip()) :]


def _lines(advice: Advice) -> Iterator[tuple[Content, Suggestion | None]]:
    if advice.plan.verdict == "fits":
        heading = "It fits. The room left could buy:" if advice.room else "It fits, and nothing larger would."
        yield Content.styled(heading, "$muted"), None
    elif not advice.suggestions:
        heading = "No set of changes makes it fit: a smaller model or a larger device is needed."
        yield Content.styled(heading, "$bad"), None
    for number, suggestion in enumerate([*advice.suggestions, *advice.room], 1):
        yield from ((content, suggestion) for content in _suggestion(number, suggestion))


def _suggestion(number: int, suggestion: Suggestion) -> Iterator[Content]:
    plan = suggestion.plan
    slower = sum(lever.slower_percent for lever in suggestion.levers)
    speed = f"about {abs(slower):.0f} % {'slower' if slower > 0 else 'faster'}" if slower else "same speed"
    yield Content.assemble(
        (f"{number} ", "bold $info"),
        (f"{size(plan.margin_bytes)} left", "bold"),
        f", micro-batch {plan.micro_batch}, {speed}",
    )
    if suggestion.changes_learning:
        yield Content.styled("  changes what is learned", "bold $caution")
    for key, (before, after) in suggestion.changes.items():
        was = f"  was {as_typed(before) or 'not set'}"
        yield Content.assemble(f"  {key} = ", (as_typed(after), "bold"), (was, "$muted"))
    for lever in suggestion.levers:
        yield Content.styled(f"  {lever.note}", "$muted")
