"""The phases of a plan as bars and as a table, with what takes memory in each: the text of the Memory screen.

The bars are those of Launch and Run. All bytes are those of one device; the first line says for which settings.

Try: `f` on the Launch screen
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from textual.content import Content

from engine.journal.event_text import clean, describe_verdict
from tui.theme import COMPONENTS
from tui.widgets.memory_bar import Look, bar_line, byte_counts, predicted_bar, scale_line
from tui.widgets.memory_words import REASONS, moves_sentence, peak_sentence, phase_words

PHASE_WIDTH = 26
"""Cells for the name of a phase in the table."""

NARROW, WIDE = 8, 13
"""Least and most cells for a figure of the table."""

MARK = "  the peak"
"""Behind the row of the phase in which the peak lies."""


class PlannedMemory(NamedTuple):
    """What the screen shows: the figures of a plan."""

    title: str
    settings: str
    """For which the figures are, as a sentence."""
    phases: Mapping[str, Mapping[str, int]]
    """Bytes of the model's tensors by phase and component."""
    components: Mapping[str, int]
    """Bytes by component at the peak, with those that are not the model's tensors."""
    deciding_phase: str
    capacity_bytes: int


def planned_memory(title: str, plan: Mapping[str, Any]) -> PlannedMemory:
    """The figures of a plan as `plan.json` has them. Raises KeyError, TypeError, ValueError or AttributeError for a
    plan in another format."""
    rows, remedies = int(plan["micro_batch"]), dict(plan.get("remedies") or {})
    settings = f"as written: {rows:,} sequence{'s' * (rows > 1)} of {int(plan['length']):,} tokens at a time"
    if remedies:
        settings += f"; it {describe_verdict(str(plan['verdict']), rows, remedies)}"
    return memory_by_phase(title, settings, plan, int(plan["capacity_bytes"]))


def memory_by_phase(title: str, settings: str, predicted: Mapping[str, Any], capacity_bytes: int) -> PlannedMemory:
    """The figures of a prediction. Raises the errors of `planned_memory`."""
    phases = {str(phase): byte_counts(parts) for phase, parts in predicted["phases"].items()}
    components, peak = byte_counts(predicted["components"]), str(predicted["deciding_phase"])
    return PlannedMemory(clean(title), clean(settings), phases, components, peak, capacity_bytes)


def phase_lines(planned: PlannedMemory, width: int, look: Look) -> list[Content]:
    """All lines of the screen, for `width` cells."""
    sentences = (
        peak_sentence(planned.deciding_phase, planned.components),
        moves_sentence(planned.deciding_phase, planned.components),
    )
    lines = Content.styled(planned.settings, "$muted").wrap(width)
    lines += [line for text in sentences for line in Content.styled(text, "bold").wrap(width)]
    lines += [Content(""), scale_line(planned.capacity_bytes, width, "")]
    lines += [line for phase in planned.phases for line in _phase(planned, phase, width, look)]
    return [*lines, Content(""), *phase_table(planned, width)]


def _phase(planned: PlannedMemory, phase: str, width: int, look: Look) -> Iterator[Content]:
    """Yield the phase's name with what takes memory in it, and its bar; that of the peak with all that is not the
    model's tensors, too."""
    peak = phase == planned.deciding_phase
    reason = f": {REASONS[phase]}" if phase in REASONS else ""
    yield from Content.assemble((phase_words(phase), "bold"), (reason, "$muted")).wrap(width)
    components = planned.components if peak else planned.phases[phase]
    yield bar_line(predicted_bar("the peak" if peak else "", components, planned.capacity_bytes), width, look)


def phase_table(planned: PlannedMemory, width: int) -> Iterator[Content]:
    """Yield the table: a row for each phase, a column for each component that any phase has."""
    names = [name for name in COMPONENTS if any(parts.get(name) for parts in planned.phases.values())]
    large = planned.capacity_bytes >= 2**30
    unit, digits = (2**30, 2) if large else (2**20, 1)
    room = width - PHASE_WIDTH - len(MARK)
    cells = [max(NARROW, len(name) + 2) for name in [*names, "total"]]
    if sum(cells) > room:
        cells = [max(NARROW, min(WIDE, room // len(cells)))] * len(cells)
    heads = "".join(
        f"{_abbreviated(name, size - 1):>{size}}" for name, size in zip([*names, "total"], cells, strict=True)
    )
    yield Content.styled(f"{'GiB' if large else 'MiB':<{PHASE_WIDTH}}{heads}", "$muted")
    for phase, parts in planned.phases.items():
        sizes = [*(parts.get(name, 0) for name in names), sum(parts.values())]
        shown = [f"{size / unit:,.{digits}f}" if size else "" for size in sizes]
        texts = "".join(f"{text:>{size}}" for text, size in zip(shown, cells, strict=True))
        mark = MARK if phase == planned.deciding_phase else ""
        yield Content.styled(f"{phase_words(phase):<{PHASE_WIDTH}}{texts}{mark}", "bold" if mark else "")


def _abbreviated(name: str, cells: int) -> str:
    """The name in at most `cells` cells, cut with a full stop."""
    return name if len(name) <= cells else f"{name[: cells - 1]}."
