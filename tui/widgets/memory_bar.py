"""The memory bar of Launch and Run: the memory of one device from 0 to its limit, and what goes beyond it.

A bar draws its parts on a scale that begins at 0 and ends at the device's memory, where a line stands in every bar;
what goes beyond is hatched on the other side of the line. So bars of one width can be compared on any screen. A
predicted bar consists of components, each with a background colour and its name or letter; without colour, every cell
shows the letter. A measured bar consists of HELD, drawn with patterns. Functions from bytes to lines; no widgets.

Try: `tunedeck -p demo -r demo`; then start it, and see the same bar beside the measured one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from textual.content import Content

from engine.journal.event_text import clean
from tui.theme import COMPONENTS, glyphs

LABEL_WIDTH = 11
"""Cells for what a bar is, before it."""

NARROWEST_BEYOND, WIDEST_BEYOND = 20, 40
"""Cells on the other side of the limit: for what goes beyond it, and for the figures."""

HELD = {"between steps": "█", "more at the peak": "▓", "reserved by torch": "░"}
"""The parts of a measured bar, and the pattern of each: what is allocated after a step, what a step allocates in
addition at its peak, and what torch has reserved beyond that."""

TICK_CELLS = 8
"""Least cells between two figures of the scale."""


class Look(NamedTuple):
    """What the terminal can display."""

    letters: bool = False
    """Whether every cell of a component shows its letter, because there are no colours."""
    ascii_only: bool = False


class MemoryBar(NamedTuple):
    """What one bar shows."""

    label: str
    parts: Sequence[tuple[str, int]]
    """Bytes of components (keys of COMPONENTS) or of what is held (keys of HELD), in the order in which they are
    drawn."""
    capacity_bytes: int
    """The device's memory: the limit."""

    @property
    def total_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(count for _, count in self.parts)


def predicted_bar(label: str, components: Mapping[str, int], capacity_bytes: int) -> MemoryBar:
    """The bar of a prediction, or of a measurement by component; components that this version does not know are drawn
    last."""
    known = [(name, components[name]) for name in COMPONENTS if components.get(name, 0) > 0]
    other = [(name, count) for name, count in components.items() if name not in COMPONENTS and count > 0]
    return MemoryBar(label, [*known, *other], capacity_bytes)


def byte_counts(components: object) -> dict[str, int]:
    """Bytes by component as a file of a run has them, without what is not a number."""
    found = components if isinstance(components, Mapping) else {}
    return {clean(name): int(count) for name, count in found.items() if isinstance(count, int | float)}


def held_bar(label: str, allocated_bytes: int, peak_bytes: int, reserved_bytes: int, capacity_bytes: int) -> MemoryBar:
    """The bar of what a running engine measures: bytes allocated between steps, at the peak, and reserved by torch."""
    held = min(allocated_bytes, peak_bytes)
    sizes = (held, peak_bytes - held, max(0, reserved_bytes - peak_bytes))
    return MemoryBar(label, list(zip(HELD, sizes, strict=True)), capacity_bytes)


def bar_cells(width: int) -> tuple[int, int]:
    """Split a line of `width` cells: (cells from 0 to the limit, cells beyond the line that marks it)."""
    beyond = max(NARROWEST_BEYOND, min(WIDEST_BEYOND, width // 4))
    return max(4, width - LABEL_WIDTH - 1 - beyond), beyond


def bar_line(bar: MemoryBar, width: int, look: Look) -> Content:
    """Draw a bar on a line of `width` cells: label, parts, free cells, the limit, what goes beyond it, and the bytes
    with their share of the device's memory."""
    cells, beyond = bar_cells(width)
    label = bar.label[: LABEL_WIDTH - 1].ljust(LABEL_WIDTH)
    limit = Content.styled(glyphs("┃", ascii_only=look.ascii_only), "bold $bad")
    return Content.assemble(label, *_within(bar, cells, look), limit, *_beyond(bar, cells, beyond, look))


def _within(bar: MemoryBar, cells: int, look: Look) -> Iterable[Content]:
    """Yield the `cells` cells from 0 to the limit."""
    end, drawn_bytes = 0, 0
    for name, count in bar.parts:
        start, drawn_bytes = end, drawn_bytes + count
        end = max(start, min(cells, round(cells * drawn_bytes / max(1, bar.capacity_bytes))))
        if end > start:
            yield _part(name, end - start, look)
    yield Content.styled(glyphs("·", ascii_only=look.ascii_only) * (cells - end), "$muted")


def _part(name: str, cells: int, look: Look) -> Content:
    """Draw `cells` cells of a part: the pattern of what is held; of a component its name, its letter, or with `letters`
    the letter in every cell."""
    if name in HELD:
        return Content.styled(glyphs(HELD[name] * cells, ascii_only=look.ascii_only), "$info")
    letter, style = _component(name)
    text = name if len(name) + 2 <= cells else letter
    return Content.styled(letter * cells if look.letters else text.center(cells), style)


def _component(name: str) -> tuple[str, str]:
    """Letter and style of a component."""
    return COMPONENTS.get(name, (name[:1] or "?", "$paper on $part-beside"))


def _beyond(bar: MemoryBar, cells: int, beyond: int, look: Look) -> Iterable[Content]:
    """Yield what stands beyond the limit: hatching for the bytes that the device does not have, to scale as far as
    there is room, then the bytes and their share of the device's memory."""
    total, capacity = bar.total_bytes, max(1, bar.capacity_bytes)
    text = f" {size_text(total)}, {100 * total / capacity:.0f} %"
    over = total - capacity
    if over > 0:
        wanted, room = max(1, round(cells * over / capacity)), max(1, beyond - len(text))
        hatch = "╱" * wanted if wanted <= room else "╱" * (room - 1) + "▶"
        yield Content.styled(glyphs(hatch, ascii_only=look.ascii_only), "bold $bad")
    yield Content.styled(text, "bold $bad" if over > 0 else "")


def size_text(count: int) -> str:
    """Format bytes: in GiB from 1 GiB on, else in MiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def scale_line(capacity_bytes: int, width: int, what: str) -> Content:
    """The scale above bars of `width` cells: round figures from 0 on, and at the limit the device's memory, followed by
    `what` it is, such as "each of 2 GPUs"."""
    cells, beyond = bar_cells(width)
    unit, name = (2**30, "GiB") if capacity_bytes >= 2**30 else (2**20, "MiB")
    whole = capacity_bytes / unit
    step = _round_step(whole * TICK_CELLS / cells)
    line = " " * LABEL_WIDTH
    for number in range(int(whole / step) + 1):
        at = LABEL_WIDTH + round(cells * number * step / whole)
        if at + 8 <= LABEL_WIDTH + cells:
            line = line.ljust(at) + f"{number * step:g}"
    limit = f"{whole:.4g} {name}"
    right = f"{limit} {what}" if len(limit) + 1 + len(what) <= beyond else limit
    return Content.assemble((line.ljust(LABEL_WIDTH + cells), "$muted"), (right, "bold"))


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20 ... (and their tenths) that is at least `least`."""
    steps = (digit * 10.0**power for power in range(-3, 6) for digit in (1, 2, 5))
    return next((step for step in steps if step >= least), max(least, 1.0))


def legend_lines(bar: MemoryBar, width: int, max_lines: int, look: Look) -> list[Content]:
    """The legend of a bar in at most `max_lines` lines: letter or pattern, name and bytes of each part. The smallest
    parts are left out where there is no room for all."""
    entries = [entry for entry in bar.parts if entry[1] > 0]
    for kept in range(len(entries), 0, -1):
        largest = sorted(entries, key=lambda entry: -entry[1])[:kept]
        shown = [_legend_entry(*entry, look) for entry in entries if entry in largest]
        lines = _side_by_side(shown, width)
        if len(lines) <= max_lines:
            return lines
    return []


def _legend_entry(name: str, count: int, look: Look) -> Content:
    if name in HELD:
        sign = Content.styled(glyphs(HELD[name] * 2, ascii_only=look.ascii_only), "$info")
    else:
        letter, style = _component(name)
        sign = Content.styled(f" {letter} ", style)
    return Content.assemble(sign, f" {name} ", (size_text(count), "$muted"), "  ")


def _side_by_side(entries: Sequence[Content], width: int) -> list[Content]:
    """Put the entries side by side into lines of at most `width` cells; no entry is split."""
    lines: list[list[Content]] = [[]]
    for entry in entries:
        if lines[-1] and sum(part.cell_length for part in lines[-1]) + entry.cell_length > width + 2:
            lines.append([])
        lines[-1].append(entry)
    return [Content.assemble(*line).rstrip() for line in lines]
