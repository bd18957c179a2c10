"""The budget at the foot of the Launch screen: the verdict, one VRAM bar for each device, a legend, and a status line.

A bar shows the predicted peak, component by component, against the device's capacity. Pure functions from evaluated
choices to lines of text for a width and a height. Every component has a background colour and its name or letter on
it; without colour every cell of the bar shows the letter.

Try: `python -m pytest tests/tui/screens/test_launch.py`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from textual.content import Content

from engine.budget.advise.plan import Plan
from engine.journal.event_text import describe_verdict
from engine.spec.files.text import visible
from tui.launch.evaluate import EvaluatedChoice
from tui.theme import COMPONENTS, VERDICTS, glyphs

LABEL_WIDTH = 10
"""Cells for the device's name before its bar."""

SHARE_WIDTH = 6
"""Cells for the percentage after the bar."""

PHASES = {
    "load": "loading", "forward": "forward pass", "loss_backward": "loss", "layer_first": "backward pass",
    "layer_last": "backward pass", "embedding_backward": "embedding", "optimizer_step": "optimizer step",
    "evaluate": "evaluation", "generate": "generation",
}  # fmt: skip
"""Descriptions of the plan's phases, by the names that `tunedeck plan` prints."""


def budget_lines(
    evaluated: EvaluatedChoice, last_valid: EvaluatedChoice, width: int, height: int,
    *, fix: str = "", letters: bool, ascii_only: bool,
) -> list[Content]:  # fmt: skip
    """The budget as exactly `height` lines. If `evaluated` has no plan, the plan of `last_valid` is shown in a muted
    colour. `fix` says which fix the key `a` applies; empty if none is known.

    With `letters`, every cell of a bar shows the letter of its component.
    """
    status = status_line(evaluated, width, fix, ascii_only=ascii_only)
    plan = last_valid.plan
    if plan is None:
        return [Content.styled("no plan", "$muted"), *[Content("")] * (height - 2), status]
    labels = _bar_labels(last_valid, max(1, height - 4))
    lines = [verdict_line(plan, width, ascii_only=ascii_only)]
    lines += [bar_line(label, plan, width, letters=letters, ascii_only=ascii_only) for label in labels]
    lines += legend_lines(plan, width, max(1, height - len(lines) - 1))
    if evaluated.plan is None:
        lines = [Content.styled(line.plain, "$muted") for line in lines]
    return [*lines, *[Content("")] * (height - len(lines) - 1), status]


def device_count(evaluated: EvaluatedChoice) -> int:
    """Return how many devices the run would use."""
    return evaluated.spec.profile.device.count if evaluated.spec is not None else 1


def _bar_labels(evaluated: EvaluatedChoice, max_bars: int) -> list[str]:
    """Return the labels of the bars: one for each device, or a single label for all devices if there are more of them
    than `max_bars`."""
    spec = evaluated.spec
    if spec is None or spec.profile.device.kind == "metered":
        return ["simulated"]
    if spec.profile.device.kind == "cpu":
        return ["host"]
    count = spec.profile.device.count
    indices = spec.limits.devices or list(range(count))
    return [f"GPU {index}" for index in indices] if count <= max_bars else [f"each of {count}"]


def status_line(evaluated: EvaluatedChoice, width: int, fix: str = "", *, ascii_only: bool) -> Content:
    """The status line: why the run cannot start, else the next step; also `fix`, what the key `a` applies, if the run
    does not fit as written."""
    if evaluated.problems:
        problem, more = evaluated.problems[0], len(evaluated.problems) - 1
        cross = glyphs("✗", ascii_only=ascii_only)
        text = f"{cross} cannot start{f' (and {more} more)' if more else ''}: {visible(problem.sentence)}"
        edit = "; enter on the field changes it"
        return Content.styled(text + (edit if problem.row and len(text + edit) <= width else ""), "$bad")
    if evaluated.notices:
        return Content.styled(f"s starts; {visible(evaluated.notices[0])}", "$caution")
    sure = evaluated.plan is not None and evaluated.plan.verdict == "fits"
    return Content.styled(_with_fix(next_step(evaluated), "" if sure else fix, width), "$muted" if sure else "$caution")


def _with_fix(step: str, fix: str, width: int) -> str:
    """The next step followed by `fix`, such as "a applies fix 1: data.packing = true": without the changes where they
    are too long for `width` cells, and without the fix where even its number is."""
    short = fix.partition(":")[0]
    texts = [f"{step}; {shown}" for shown in (fix, short) if shown]
    return next((text for text in texts if cell_len(text) <= width), step)


def next_step(evaluated: EvaluatedChoice) -> str:
    """What the key `s` does with a choice that has no problems, or which key to press instead."""
    plan, split = evaluated.plan, evaluated.batch_split
    if evaluated.to_simulate is not None:
        return f"{evaluated.unplanned} no closed form for this family: its plan is there in some seconds"
    if plan is None or split is None:
        return f"s starts with small micro-batches and learns what fits; no plan: {visible(evaluated.unplanned)}"
    if plan.verdict == "does_not_fit":
        return "it does not fit: S starts it anyway"
    if plan.verdict == "fits_smaller" and plan.simulated:
        return "s starts it as written, to show that an out-of-memory error is survived"
    if plan.verdict == "fits_smaller":
        words = describe_verdict(plan.verdict, plan.micro_batch, plan.remedies).removeprefix("fits with ")
        return f"s starts with {words}; the result stays the same"
    return f"s starts with {split.sentence}"


def decimal_bytes(count: int) -> str:
    """Format `count` bytes: in MiB below 10 GiB, else in GiB."""
    return f"{count / 2**20:,.1f} MiB" if abs(count) < 10 * 2**30 else f"{count / 2**30:,.2f} GiB"


def bar_line(label: str, plan: Plan, width: int, *, letters: bool, ascii_only: bool) -> Content:
    """Draw the bar of one device on a line of `width` cells: label, components, free cells, a line at the capacity, and
    the share of the capacity that is used. With `letters`, every cell shows the letter of its component."""
    cells = max(4, width - LABEL_WIDTH - SHARE_WIDTH)
    used, capacity = plan.prediction.device_bytes, plan.capacity_bytes
    cells_per_byte = cells / max(used, capacity, 1)
    capacity_cell = min(round(capacity * cells_per_byte), cells - 1)
    parts: list[Content] = []
    start, drawn_bytes = 0, 0
    for name, count in _nonzero(plan.prediction.components):
        drawn_bytes += count
        end = min(round(drawn_bytes * cells_per_byte), cells)
        parts += _segment(name, start, end, capacity_cell, letters=letters, ascii_only=ascii_only)
        start = max(start, end)
    parts += _free(start, cells, capacity_cell, ascii_only=ascii_only)
    share = f"{100 * used / max(capacity, 1):.0f} %"
    return Content.assemble(label[: LABEL_WIDTH - 1].ljust(LABEL_WIDTH), *parts, share.rjust(SHARE_WIDTH))


def _nonzero(components: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(name, components[name]) for name in COMPONENTS if components.get(name, 0) > 0]


def _segment(
    name: str, start: int, end: int, capacity_cell: int, *, letters: bool, ascii_only: bool
) -> list[Content]:
    """Draw cells `start` to `end` (excluded) of a bar, those of the component `name`: its name, its letter, or with
    `letters` the letter in every cell. If the cell `capacity_cell` is among them, the line of the capacity is drawn
    there. Empty if there are no cells."""
    width = end - start
    if width <= 0:
        return []
    component = COMPONENTS[name]
    text = name if len(name) + 2 <= width else component.letter
    text = component.letter * width if letters else text.center(width)
    if not start <= capacity_cell < end:
        return [Content.styled(text, component.style)]
    at = capacity_cell - start
    before, after = Content.styled(text[:at], component.style), Content.styled(text[at + 1 :], component.style)
    return [before, _capacity_line(ascii_only), after]


def _free(start: int, cells: int, capacity_cell: int, *, ascii_only: bool) -> list[Content]:
    """Draw the free cells of a bar, from `start` to its end at `cells`, and the line of the capacity if the cell
    `capacity_cell` is among them."""
    if start >= cells:
        return []
    free = Content.styled(glyphs("·", ascii_only=ascii_only) * (cells - start), "$muted")
    if capacity_cell < start:
        return [free]
    at = capacity_cell - start
    return [free[:at], _capacity_line(ascii_only), free[at + 1 :]]


def _capacity_line(ascii_only: bool) -> Content:
    return Content.styled(glyphs("│", ascii_only=ascii_only), "bold $bad")


def legend_lines(plan: Plan, width: int, max_lines: int) -> list[Content]:
    """Return the legend in at most `max_lines` lines: letter, name and size of each component. The smallest components
    are left out where there is no room for all."""
    entries = _nonzero(plan.prediction.components)
    for kept in range(len(entries), 0, -1):
        largest = sorted(entries, key=lambda entry: -entry[1])[:kept]
        lines = _wrap_entries([_legend_entry(*entry) for entry in entries if entry in largest], width)
        if len(lines) <= max_lines:
            return lines
    return []


def _legend_entry(name: str, count: int) -> Content:
    component = COMPONENTS[name]
    letter = (f" {component.letter} ", component.style)
    return Content.assemble(letter, f" {name} ", (decimal_bytes(count), "$muted"), "  ")


def _wrap_entries(entries: Sequence[Content], width: int) -> list[Content]:
    """Put the entries side by side into lines of at most `width` cells; no entry is split."""
    lines: list[list[Content]] = [[]]
    for entry in entries:
        if lines[-1] and sum(part.cell_length for part in lines[-1]) + entry.cell_length > width + 2:
            lines.append([])
        lines[-1].append(entry)
    return [Content.assemble(*line).rstrip() for line in lines]


def verdict_text(verdict: str, words: str = "", *, ascii_only: bool) -> Content:
    """A verdict's glyph, followed by `words`, in the verdict's colour. If `words` is empty, the verdict's name is
    shown."""
    shown = VERDICTS[verdict]
    text = words or verdict.replace("_", " ")
    return Content.styled(f"{shown.letter if ascii_only else shown.glyph} {text}", shown.style)


def verdict_line(plan: Plan, width: int, *, ascii_only: bool) -> Content:
    """A line with the verdict, the predicted peak and the capacity, the bytes left or missing, the phase of the peak,
    and the length of the planned sequences with its origin. If `width` is too small for all, length and phase are left
    out first, then peak and capacity; verdict and bytes left are always shown."""
    used, margin = plan.prediction.device_bytes, plan.margin_bytes
    unit, name, digits = (2**30, "GiB", 2) if used >= 2**30 else (2**20, "MiB", 1)
    sizes = [f"{count / unit:,.{digits}f}" for count in (used, plan.capacity_bytes, abs(margin))]
    left = f"{sizes[2]} {name} {'left' if margin >= 0 else 'missing'}"
    phase = PHASES.get(plan.prediction.deciding_phase, plan.prediction.deciding_phase)
    length = f"{plan.length} tokens, {'the longest of the data' if plan.basis == 'data' else 'data.max_length'}"
    texts = [f"{sizes[0]} of {sizes[1]} {name}", left, f"peak in the {phase}", length]
    words = describe_verdict(plan.verdict, remedies=plan.remedies)
    head = verdict_text(plan.verdict, words, ascii_only=ascii_only)
    while head.cell_length + sum(len(text) + 3 for text in texts) > width and len(texts) > 1:
        texts.pop(-1 if len(texts) > 2 else 0)
    return Content.assemble(head, *(f"   {text}" for text in texts))
