"""Profiles and recipes as rows of a list. Pure functions; titles and names come from files, so control
characters are replaced."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from engine.config.files.text import visible
from tui.files.catalog import FileEntry
from tui.launch.budget_bar import plan_verdict
from tui.launch.evaluate import EvaluatedChoice
from tui.theme import glyphs

MAX_NAME_SHARE = 0.4
"""Share of a line that the longest name may take; a longer one is cut."""

VERDICT_WIDTH = 28
"""Cells of the longest common verdict: "◐ fits with micro-batch 1024"."""


def name_width(entries: Sequence[FileEntry], width: int) -> int:
    """The width of the column of names, in cells, for a list of these entries in lines of `width` cells."""
    return min(int(MAX_NAME_SHARE * width), max((len(entry.path.stem) for entry in entries), default=0))


def profile_row(entry: FileEntry, *, chosen: bool, name_width: int, ascii_only: bool) -> Content:
    """Return a row with a profile's name, in `name_width` cells, and a note: that it is the profile of this machine,
    why it does not match this machine, or its title. `chosen`: the row is marked as the chosen one."""
    mark, name = _mark_and_name(entry, chosen, name_width, ascii_only)
    if entry.broken or entry.problem:
        glyph = glyphs("✗" if entry.broken else "⚠", ascii_only=ascii_only)
        style = "$bad" if entry.broken else "$caution"
        return Content.assemble(mark, (name, "$muted"), " ", (f"{glyph} {visible(entry.problem)}", style))
    title = visible(entry.title)
    if not entry.is_this_machine:
        return Content.assemble(mark, name, " ", (title, "$muted"))
    device = title.removeprefix("This machine's ")
    return Content.assemble(mark, name, " ", ("this machine", "bold $good"), (f"  {device}", "$muted"))


def recipe_row(
    entry: FileEntry, evaluated: EvaluatedChoice | None, *, chosen: bool, name_width: int, ascii_only: bool
) -> Content:
    """Return a row with a recipe's name, in `name_width` cells, its verdict on the chosen profile ("…" until it is
    computed; where it does not fit, the profile that it is made for), and its title. `chosen`: the row is marked as the
    chosen one."""
    mark, name = _mark_and_name(entry, chosen, name_width, ascii_only)
    if entry.broken:
        cross = glyphs("✗", ascii_only=ascii_only)
        return Content.assemble(mark, (name, "$muted"), " ", (f"{cross} {visible(entry.problem)}", "$bad"))
    verdict = _verdict(evaluated, entry.made_for, ascii_only)
    padded = verdict.pad_right(max(0, VERDICT_WIDTH - verdict.cell_length))
    return Content.assemble(mark, name, " ", padded, " ", (visible(entry.title), "$muted"))


def _mark_and_name(entry: FileEntry, chosen: bool, name_width: int, ascii_only: bool) -> tuple[Content, str]:
    mark = Content.styled(glyphs("▶ " if chosen else "  ", ascii_only=ascii_only), "bold $info")
    name = visible(entry.path.stem)
    cut = name if len(name) <= name_width else name[: name_width - 1] + glyphs("…", ascii_only=ascii_only)
    return mark, cut.ljust(name_width)


def _verdict(evaluated: EvaluatedChoice | None, made_for: str, ascii_only: bool) -> Content:
    if evaluated is None:
        return Content.styled(glyphs("…", ascii_only=ascii_only), "$muted")
    plan = evaluated.plan
    if plan is not None and (plan.verdict != "does_not_fit" or not made_for):
        return plan_verdict(plan, ascii_only=ascii_only)
    cross = glyphs("✗", ascii_only=ascii_only)
    if made_for and (plan is not None or evaluated.problems):
        return Content.styled(f"{cross} made for {visible(made_for)}", "$muted")
    return Content.styled(f"{cross} not on this machine" if evaluated.problems else "? no plan", "$muted")
