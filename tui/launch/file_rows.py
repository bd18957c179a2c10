"""Profiles and recipes as rows of a list. Pure functions; titles and names are strangers' text and are cleaned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.content import Content

from engine.spec.files.text import visible
from tui.files.catalog import Entry
from tui.launch.choice import Outcome
from tui.theme import VERDICTS, draw

NAME_WIDTH = 18
"""Longest name that is shown whole."""

VERDICT_WIDTH = 14


def name_width(entries: Sequence[Entry]) -> int:
    """Cells for the names of a list."""
    return min(NAME_WIDTH, max((len(entry.path.stem) for entry in entries), default=0))


def profile_row(entry: Entry, *, chosen: bool, names: int, ascii_only: bool) -> Content:
    """A profile: whether it is this machine, or why it does not match it."""
    mark = Content.styled(draw("▶ " if chosen else "  ", ascii_only=ascii_only), "bold $info")
    name = visible(entry.path.stem)[:names].ljust(names)
    if entry.broken or entry.trouble:
        glyph = draw("✗" if entry.broken else "⚠", ascii_only=ascii_only)
        style = "$bad" if entry.broken else "$caution"
        return Content.assemble(mark, (name, "$muted"), " ", (f"{glyph} {visible(entry.trouble)}", style))
    title = visible(entry.title)
    if not entry.here:
        return Content.assemble(mark, name, " ", (title, "$muted"))
    own = title.removeprefix("This machine's ")
    return Content.assemble(mark, name, " ", ("this machine", "bold $good"), (f"  {own}", "$muted"))


def recipe_row(entry: Entry, outcome: Outcome | None, *, chosen: bool, names: int, ascii_only: bool) -> Content:
    """A recipe with its verdict for the chosen profile; the verdict is empty until it is known."""
    mark = Content.styled(draw("▶ " if chosen else "  ", ascii_only=ascii_only), "bold $info")
    name = visible(entry.path.stem)[:names].ljust(names)
    if entry.broken:
        glyph = draw("✗", ascii_only=ascii_only)
        return Content.assemble(mark, (name, "$muted"), " ", (f"{glyph} {visible(entry.trouble)}", "$bad"))
    verdict = _verdict(outcome, lambda text: draw(text, ascii_only=ascii_only), ascii_only)
    padded = verdict.pad_right(max(0, VERDICT_WIDTH - verdict.cell_length))
    return Content.assemble(mark, name, " ", padded, " ", (visible(entry.title), "$muted"))


def _verdict(outcome: Outcome | None, glyph: Callable[[str], str], ascii_only: bool) -> Content:
    if outcome is None:
        return Content.styled(glyph("…"), "$muted")
    if outcome.plan is None:
        return Content.styled(f"{glyph('✗')} not here" if outcome.troubles else "? no plan", "$muted")
    shown = VERDICTS[outcome.plan.verdict]
    words = outcome.plan.verdict.replace("_", " ")
    return Content.styled(f"{shown.letter if ascii_only else shown.glyph} {words}", shown.style)
