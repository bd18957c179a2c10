"""The VRAM bar: what each device would hold at the peak, component by component, against its capacity.

Pure functions from a plan to lines; the widget is `Lines`. Colours are grounds, and on each ground stands the
component's name or letter: with no colour at all every cell shows the letter.

Try: `python -m pytest tests/tui/screens/test_launch.py`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.content import Content

from engine.budget.advise.plan import Plan
from tui.theme import PARTS, VERDICTS, draw

LABEL = 10
"""Cells for the device's name before its bar."""

SHARE = 6
"""Cells for the percentage after it."""


PHASES = {
    "load": "loading", "forward": "forward pass", "loss_backward": "loss", "layer_first": "backward pass",
    "layer_last": "backward pass", "embedding_backward": "embedding", "optimizer_step": "optimizer step",
    "evaluate": "evaluation", "generate": "generation",
}  # fmt: skip
"""The plan's phases in words; `tunedeck plan` has their names."""


def size(bytes_: int) -> str:
    """Bytes for a reader: MiB below 10 GiB, else GiB."""
    return f"{bytes_ / 2**20:,.1f} MiB" if abs(bytes_) < 10 * 2**30 else f"{bytes_ / 2**30:,.2f} GiB"


def bar_line(label: str, plan: Plan, width: int, *, letters: bool, ascii_only: bool) -> Content:
    """One device's bar: its name, the components, free cells, the capacity line, the share of the capacity."""
    cells = max(4, width - LABEL - SHARE)
    used, capacity = plan.prediction.device_bytes, plan.capacity_bytes
    scale = cells / max(used, capacity, 1)
    line = min(round(capacity * scale), cells - 1)
    parts: list[Content] = []
    start, held = 0, 0
    for name, amount in _present(plan.prediction.components):
        held += amount
        end = min(round(held * scale), cells)
        parts += _segment(name, start, end, line, letters=letters, ascii_only=ascii_only)
        start = max(start, end)
    parts += _free(start, cells, line, ascii_only=ascii_only)
    share = f"{100 * used / max(capacity, 1):.0f} %"
    return Content.assemble(label[: LABEL - 1].ljust(LABEL), *parts, share.rjust(SHARE))


def _present(components: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(name, components[name]) for name in PARTS if components.get(name, 0) > 0]


def _segment(name: str, start: int, end: int, line: int, *, letters: bool, ascii_only: bool) -> list[Content]:
    """A component's cells, the capacity line drawn over them where it falls among them."""
    width = end - start
    if width <= 0:
        return []
    part = PARTS[name]
    text = part.letter * width if letters else (name if len(name) + 2 <= width else part.letter).center(width)
    if not start <= line < end:
        return [Content.styled(text, part.style)]
    at = line - start
    return [Content.styled(text[:at], part.style), _capacity(ascii_only), Content.styled(text[at + 1 :], part.style)]


def _free(start: int, cells: int, line: int, *, ascii_only: bool) -> list[Content]:
    if start >= cells:
        return []
    free = Content.styled(draw("·", ascii_only=ascii_only) * (cells - start), "$muted")
    if line < start:
        return [free]
    at = line - start
    return [free[:at], _capacity(ascii_only), free[at + 1 :]]


def _capacity(ascii_only: bool) -> Content:
    return Content.styled(draw("│", ascii_only=ascii_only), "bold $bad")


def legend_lines(plan: Plan, width: int, rows: int) -> list[Content]:
    """What the letters mean and how much each is; the smallest are left out where the rows do not take them all."""
    entries = _present(plan.prediction.components)
    for kept in range(len(entries), 0, -1):
        largest = sorted(entries, key=lambda entry: -entry[1])[:kept]
        lines = _packed([_legend(*entry) for entry in entries if entry in largest], width)
        if len(lines) <= rows:
            return lines
    return []


def _legend(name: str, amount: int) -> Content:
    part = PARTS[name]
    return Content.assemble((f" {part.letter} ", part.style), f" {name} ", (size(amount), "$muted"), "  ")


def _packed(entries: Sequence[Content], width: int) -> list[Content]:
    """Entries side by side, wrapped between them."""
    lines: list[list[Content]] = [[]]
    for entry in entries:
        if lines[-1] and sum(part.cell_length for part in lines[-1]) + entry.cell_length > width + 2:
            lines.append([])
        lines[-1].append(entry)
    return [Content.assemble(*line).rstrip() for line in lines]


def verdict_content(verdict: str, *, ascii_only: bool) -> Content:
    """Glyph and words of a verdict in its colour."""
    shown = VERDICTS[verdict]
    return Content.styled(f"{shown.letter if ascii_only else shown.glyph} {verdict.replace('_', ' ')}", shown.style)


def verdict_line(plan: Plan, width: int, *, ascii_only: bool) -> Content:
    """Verdict, peak of capacity, margin, and the phase that decides."""
    used, margin = plan.prediction.device_bytes, plan.margin_bytes
    left = f"{size(abs(margin))} {'left' if margin >= 0 else 'missing'}"
    phase = PHASES.get(plan.prediction.deciding_phase, plan.prediction.deciding_phase)
    texts = [f"{size(used)} of {size(plan.capacity_bytes)}", left, f"{phase} decides"]
    head = verdict_content(plan.verdict, ascii_only=ascii_only)
    while head.cell_length + sum(len(text) + 3 for text in texts) > width and len(texts) > 1:
        texts.pop(0)
    return Content.assemble(head, *(f"   {text}" for text in texts))
