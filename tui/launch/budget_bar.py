"""The budget at the foot of the Launch screen: the verdict, the memory bar with its scale and legend, where the peak
lies and what lowers it, and a status line.

Pure functions from evaluated choices to lines of text for a width and a height. The bar itself, the same as on the Run
screen, is in `tui.widgets.memory_bar`.

Try: `python -m pytest tests/tui/screens/test_launch.py`
"""

from __future__ import annotations

from rich.cells import cell_len
from textual.content import Content

from engine.budget.advise.plan import Plan
from engine.config.files.text import visible
from engine.config.schema.run import RunSpec
from engine.journal.event_text import describe_verdict
from tui.launch.evaluate import EvaluatedChoice
from tui.launch.needs import Needs, needs_line
from tui.theme import VERDICTS, glyphs
from tui.widgets.memory_bar import Look, bar_line, legend_lines, predicted_bar, scale_line
from tui.widgets.memory_words import moves_sentence, peak_sentence, phase_words

STATUS_LINES = 3
"""Most lines of the reason why a run cannot start."""

MOST_LEGEND = 2
"""Lines of the legend where there is room for more."""


def budget_lines(
    evaluated: EvaluatedChoice, last_valid: EvaluatedChoice, needs: Needs, width: int, height: int, *,
    fix: str = "", basis: str = "", look: Look,
) -> list[Content]:  # fmt: skip
    """The budget as exactly `height` lines. If `evaluated` has no plan, the plan of `last_valid` is shown in a muted
    colour. What prevents a start takes as many lines as it needs, at most STATUS_LINES. `needs` is what the run needs
    beside memory. `fix` says which fix the key `a` applies; empty if none is known. `basis` says for which sequences
    the plan is."""
    if last_valid.plan is None:
        wrapped = _wrapped_status(evaluated, width, height - 1, fix, look)
        return [Content.styled("no plan", "$muted"), *[Content("")] * (height - 1 - len(wrapped)), *wrapped]
    device = _device_words(last_valid.spec)
    last = _wrapped_status(evaluated, width, min(STATUS_LINES, height - 3), fix, look) if evaluated.problems else []
    if not last:
        last = [status_line(evaluated, width, fix, ascii_only=look.ascii_only)]
    lines = _plan_lines(last_valid.plan, device, needs, basis, width, height - len(last), look)
    if evaluated.plan is None:
        lines = [
            Content.styled(line.plain, "$muted") for line in [_of_earlier_values(evaluated, last_valid), *lines[1:]]
        ]
    return [*lines, *[Content("")] * (height - len(lines) - len(last)), *last]


def _wrapped_status(evaluated: EvaluatedChoice, width: int, height: int, fix: str, look: Look) -> list[Content]:
    """The whole status line in at most `height` lines of `width` cells; the last one ends in an ellipsis if there is
    more."""
    whole = status_line(evaluated, 10**6, fix, ascii_only=look.ascii_only)
    lines = list(whole.wrap(width))
    if len(lines) > height > 0:
        rest = Content(" ").join(line.rstrip() for line in lines[height - 1 :])
        lines[height - 1] = Content.assemble(rest.truncate(width - 1), glyphs("…", ascii_only=look.ascii_only))
    return lines[:height]


def _of_earlier_values(evaluated: EvaluatedChoice, last_valid: EvaluatedChoice) -> Content:
    """In place of the verdict: what the plan is of, as it is not of the values that are written."""
    key = next((problem.row for problem in evaluated.problems if problem.row), "")
    value = _value_of(last_valid.spec, key)
    of = f"{key.rpartition('.')[2].replace('_', '-')} {visible(value)}" if value else "earlier values"
    return Content(f"no plan for these settings; this one is for {of}")


def _value_of(spec: RunSpec | None, key: str) -> str:
    """The value of a recipe's or profile's key as text; empty where the key names no single value."""
    if spec is None or not key:
        return ""
    for table in (spec.recipe, spec.profile):
        node: object = table
        for part in key.split("."):
            node = getattr(node, part, None)
        if isinstance(node, (str, int, float)):
            return str(node)
    return ""


def _plan_lines(
    plan: Plan, device: str, needs: Needs, basis: str, width: int, height: int, look: Look
) -> list[Content]:
    """The plan in at most `height` lines, three or more: verdict, bar and legend; where there is room, also the
    lengths that it is for, disk and time, the scale, and the words about the peak."""
    prediction = plan.prediction
    bar = predicted_bar("predicted", prediction.components, plan.capacity_bytes)
    legend = legend_lines(bar, width, min(MOST_LEGEND, height - 2), look)
    sentences = (
        peak_sentence(prediction.deciding_phase, prediction.components),
        moves_sentence(prediction.deciding_phase, prediction.components),
    )
    room = height - 2 - len(legend)
    lengths = Content.styled(basis, "$muted").wrap(width)[: max(0, min(1, room))] if basis else []
    room -= len(lengths)
    beside = [needs_line(needs, width)][: max(0, room)]
    room -= len(beside)
    scaled = room >= 1
    words = [line for text in sentences for line in Content.styled(text, "$muted").wrap(width)][: max(0, room - 1)]
    verdict = verdict_line(plan, width, with_phase=not words, ascii_only=look.ascii_only)
    scale = [scale_line(plan.capacity_bytes, width, device)] if scaled else []
    drawn = bar_line(bar if scaled else bar._replace(label=device), width, look)
    return [verdict, *lengths, *scale, drawn, *legend, *words, *beside]


def _device_words(spec: RunSpec | None) -> str:
    """What the memory is of: the host, a simulated device, a GPU, or each of several."""
    if spec is None or spec.profile.device.kind == "metered":
        return "simulated"
    if spec.profile.device.kind == "cpu":
        return "host"
    count = spec.profile.device.count
    return f"each of {count}" if count > 1 else f"GPU {(spec.limits.devices or [0])[0]}"


def status_line(evaluated: EvaluatedChoice, width: int, fix: str = "", *, ascii_only: bool) -> Content:
    """The status line: why the run cannot start, else the next step; also `fix`, what the key `a` applies, if the run
    does not fit as written."""
    if evaluated.problems:
        problem, more = evaluated.problems[0], len(evaluated.problems) - 1
        cross = glyphs("✗", ascii_only=ascii_only)
        text = f"{cross} cannot start{f' (and {more} more)' if more else ''}: {visible(problem.sentence)}"
        edit = "; change its field"
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
        return f"{evaluated.unplanned} no memory formula for this model family; simulating"
    if evaluated.lacks_config:
        return f"s checks the hub for the model first and starts if it is there: {visible(evaluated.unplanned)}"
    if plan is None or split is None:
        return f"s starts with small micro-batches and adapts; no plan: {visible(evaluated.unplanned)}"
    if plan.verdict == "does_not_fit":
        return "it does not fit: S starts it anyway"
    if plan.verdict == "fits_smaller" and plan.simulated:
        return "s starts it as written, to show recovery from an out-of-memory error"
    if plan.verdict == "fits_smaller":
        words = describe_verdict(plan.verdict, plan.micro_batch, plan.remedies).removeprefix("fits with ")
        return f"s starts with {words}; the result stays the same"
    return f"s starts with {split.sentence}"


def decimal_bytes(count: int) -> str:
    """Format `count` bytes: in MiB below 1 GiB, else in GiB, as the verdict beside it does."""
    return f"{count / 2**20:,.1f} MiB" if abs(count) < 2**30 else f"{count / 2**30:,.2f} GiB"


def plan_verdict(plan: Plan, *, ascii_only: bool) -> Content:
    """A plan's verdict in words, after its glyph; "fits, tight" if less is left than the prediction may be wrong by."""
    words = describe_verdict(plan.verdict, remedies=plan.remedies)
    shown = verdict_text(plan.verdict, words, ascii_only=ascii_only)
    return Content.assemble(shown, (", tight", "bold $caution")) if plan.is_tight else shown


def verdict_text(verdict: str, words: str = "", *, ascii_only: bool) -> Content:
    """A verdict's glyph, followed by `words`, in the verdict's colour. If `words` is empty, the verdict's name is
    shown."""
    shown = VERDICTS[verdict]
    text = words or verdict.replace("_", " ")
    return Content.styled(f"{shown.letter if ascii_only else shown.glyph} {text}", shown.style)


def verdict_line(plan: Plan, width: int, *, with_phase: bool = True, ascii_only: bool) -> Content:
    """A line with the verdict, the predicted peak and the capacity, the bytes left or missing, and the phase of the
    peak (unless `with_phase` is false). If `width` is too small for all, the phase is left out first, then peak and
    capacity; verdict and bytes left are always shown."""
    used, margin = plan.prediction.device_bytes, plan.margin_bytes
    unit, name, digits = (2**30, "GiB", 2) if used >= 2**30 else (2**20, "MiB", 1)
    sizes = [f"{count / unit:,.{digits}f}" for count in (used, plan.capacity_bytes, abs(margin))]
    left = f"{sizes[2]} {name} {'left' if margin >= 0 else 'missing'}"
    phase = [f"peak in the {phase_words(plan.prediction.deciding_phase)}"] if with_phase else []
    texts = [f"{sizes[0]} of {sizes[1]} {name}", left, *phase]
    head = plan_verdict(plan, ascii_only=ascii_only)
    if plan.verdict == "fits_smaller":  # beside the figures, "fits" alone would be of what is written
        words = f"too big; {describe_verdict(plan.verdict, remedies=plan.remedies)}"
        head = verdict_text(plan.verdict, words, ascii_only=ascii_only)
    while head.cell_length + sum(len(text) + 3 for text in texts) > width and len(texts) > 1:
        texts.pop(-1 if len(texts) > 2 else 0)
    return Content.assemble(head, *(f"   {text}" for text in texts))
