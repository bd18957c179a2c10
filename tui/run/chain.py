"""The chain of a staged run: each stage with its state (done, running, pending, skipped), and which stage the Run
screen shows.

Pure functions of a `RunWatch`; nothing here reads events or uses widgets.

Try: `[link.state for link in chain_of(watch)]`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from textual.content import Content

from engine.journal.directory import enabled_stages, read_spec
from engine.journal.event_text import clean
from engine.journal.summary import RunSummary
from tui.run.table import state_of
from tui.run.watch import RunWatch
from tui.theme import STATES, glyphs

TO_COME = "pending"
ARROW = " → "

KEYS = "[ ] show others "
"""Help on the keys, shown at the right end of the line where there is room."""


class Link(NamedTuple):
    """One stage of the chain: its name and state."""

    name: str
    state: str
    """The stage's status in the journal; "skipped" or "pending" for a stage that has none."""


def chain_of(watch: RunWatch) -> list[Link]:
    """Return the enabled stages of a staged run with their states, in order; empty for a run without stages."""
    summary = watch.summary
    if summary is None:
        return []
    return [Link(name, _state_of(name, summary)) for name in enabled_stages(read_spec(watch.directory))]


def _state_of(name: str, summary: RunSummary) -> str:
    status = next((str(row["status"]) for row in summary.stages if row["name"] == name), TO_COME)
    # The journal has no end of a stage whose conductor was killed: such a stage is what its run is.
    return state_of(summary) if status == "running" else status


def current_stage(watch: RunWatch) -> str:
    """Return the name of the stage that runs, or that ran last; empty before the first stage."""
    return watch.state.stage


def stage_beside(chain: Sequence[Link], looked_at: str, by: int) -> tuple[str, str | None]:
    """Return (name, None) of the stage `by` places after the stage `looked_at`, before it if `by` is negative; ("",
    reason) if there is no such stage."""
    names = [link.name for link in chain]
    if not names:
        return "", "this run has no stages"
    at = names.index(looked_at) if looked_at in names else -1 if by > 0 else 0
    if not 0 <= at + by < len(names):
        return "", f"{looked_at or names[0]} is the {'last' if by > 0 else 'first'} stage"
    return names[at + by], None


def chain_line(chain: Sequence[Link], looked_at: str, width: int, *, ascii_only: bool) -> Content:
    """Draw the chain on one line; the stage that the panes show (`looked_at`) has reversed colours. If there is no room
    for every state in words, only that stage has one; if there is no room for all names, stages far from it are left
    out."""
    place = next((index for index, link in enumerate(chain) if link.name == looked_at), -1)
    links = [_link(link, index == place, True, ascii_only=ascii_only) for index, link in enumerate(chain)]
    if _width(links) > width:
        links = [_link(link, index == place, index == place, ascii_only=ascii_only) for index, link in enumerate(chain)]
    line = _join(_nearest(links, max(place, 0), width, ascii_only=ascii_only), ascii_only=ascii_only)
    room = width - line.cell_length - len(KEYS)
    return Content.assemble(line, " " * room, (KEYS, "$muted")) if room > 0 else line


def _nearest(links: list[Content], place: int, width: int, *, ascii_only: bool) -> list[Content]:
    """Return the links around index `place` that fit into `width` cells, with dots at each end where links were left
    out."""
    dots = Content.styled(glyphs("…", ascii_only=ascii_only), "$muted")
    first, last = 0, len(links)
    while True:
        shown = [*([dots] if first else []), *links[first:last], *([dots] if last < len(links) else [])]
        if _width(shown) <= width or last - first == 1:
            return shown
        if place - first >= last - 1 - place:
            first += 1
        else:
            last -= 1


def _link(link: Link, looked_at: bool, in_words: bool, *, ascii_only: bool) -> Content:
    shown = STATES.get(link.state, STATES["stale"])
    glyph = Content.styled(f"{shown.letter if ascii_only else shown.glyph} ", shown.style)
    text = clean(link.name)
    name = Content.styled(f" {text} ", "bold reverse") if looked_at else Content(text)
    return Content.assemble(glyph, name, (f" {clean(link.state)}", shown.style) if in_words else "")


def _width(links: Sequence[Content]) -> int:
    return 1 + sum(link.cell_length for link in links) + len(ARROW) * (len(links) - 1)


def _join(links: Sequence[Content], *, ascii_only: bool) -> Content:
    arrow = Content.styled(glyphs(ARROW, ascii_only=ascii_only), "$muted")
    return Content.assemble(" ", *[part for link in links for part in (arrow, link)][1:])
