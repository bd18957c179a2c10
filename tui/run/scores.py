"""The scores of a run as lines: a bar for each scored checkpoint, and generated answers beside their references.

Functions from a `RunWatch` to lines; they read no files and use no widgets. Scores of `tunedeck eval` come first, then
those of the evaluations during training.

Try: `b` on the Run screen of a run that was scored
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from textual.content import Content

from engine.journal.evaluations import Evaluation
from engine.journal.event_text import clean, format_score
from engine.journal.score_groups import best_checkpoints, lower_is_better
from tui.run.watch import RunWatch
from tui.theme import SPACE

Glyphs = Callable[[str], str]

LABEL_WIDTH, VALUE_WIDTH = 12, 10
MOST_BAR = 40
MOST_CHECKPOINTS = 8
"""Checkpoints with a bar for each metric: the newest, and the best."""
MOST_LINES = 4
"""Lines of one answer; --json of `tunedeck eval` has all of it."""


def has_scores(watch: RunWatch) -> bool:
    """Whether there is a score or a generated sample to show."""
    return bool(watch.evaluations or watch.state.evals)


def score_lines(watch: RunWatch, width: int, glyphs: Glyphs, back: int = 0) -> list[Content]:
    """Return bars of every score by checkpoint, then the newest samples, or those `back` evaluations before, as lines
    of `width` cells. `glyphs` replaces the console's glyphs by ASCII characters where necessary."""
    bar = max(6, min(MOST_BAR, width - LABEL_WIDTH - VALUE_WIDTH - 14))
    lines = [*_of_evaluations(watch.evaluations, bar, glyphs), *_of_training(watch, bar, glyphs)]
    return [*lines, *sample_lines(watch, width, glyphs, back)]


def _of_evaluations(found: Sequence[Evaluation], bar: int, glyphs: Glyphs) -> Iterator[Content]:
    for data, count in dict.fromkeys((each.data, each.count) for each in found):
        group = [each for each in found if (each.data, each.count) == (data, count)]
        sources = ", ".join(map(clean, group[0].sources))
        yield Content.styled(f" scored on {sources or 'samples'} ({count} samples)", "bold")
        for metric in dict.fromkeys(name for each in group for name in each.metrics):
            rows = {each.step: each.metrics[metric] for each in group if metric in each.metrics}
            yield from bar_lines(metric, rows, bar, glyphs)


def _of_training(watch: RunWatch, bar: int, glyphs: Glyphs) -> Iterator[Content]:
    evals = watch.state.evals
    if not evals:
        return
    yield Content.styled(" scored during training", "bold")
    for metric in dict.fromkeys(name for event in evals for name in event["metrics"]):
        rows = {int(event["step"]): event["metrics"].get(metric) for event in evals}
        yield from bar_lines(metric, rows, bar, glyphs, start="step 0")


def full_bar(metric: str, values: Iterable[float | None]) -> float:
    """The value whose bar is full: 1 for scores from 0 to 1, so that a low share looks low; else the largest of
    `values`."""
    largest = max((abs(value) for value in values if isinstance(value, int | float)), default=0.0)
    return 1.0 if not largest or (largest <= 1.0 and not lower_is_better(metric)) else largest


def bar_lines(
    metric: str,
    rows: Mapping[int, float | None],
    bar: int,
    glyphs: Glyphs,
    *,
    start: str = "base",
    full_at: float | None = None,
) -> Iterator[Content]:
    """Yield the name of a metric, then a line for each checkpoint: step, value, a bar, a star at the best. `rows` maps
    steps to values, `bar` is the width of a bar in cells, and `start` is what step 0 is called. The bar of the value
    `full_at` is full; None: `full_bar` of these rows."""
    known = {step: value for step, value in sorted(rows.items()) if isinstance(value, int | float)}
    if not known:
        return
    best = best_checkpoints(metric, known)
    shown = list(known)[-MOST_CHECKPOINTS:]
    shown = [step for step in known if step in shown or step in best or step == 0]
    top = full_at if full_at is not None else full_bar(metric, known.values())
    better = "lower is better" if lower_is_better(metric) else ""
    yield Content.assemble(f"  {clean(metric).replace('_', ' ')}", (f"  {better}", "$muted"))
    for step in shown:
        full = round(bar * abs(known[step]) / top)
        label = start if step == 0 else f"step {step:,}"
        yield Content.assemble(
            (f"    {label:<{LABEL_WIDTH}}", "$muted"), f"{format_score(metric, known[step]):>{VALUE_WIDTH}} ",
            (glyphs("█" * full), "$mark" if step in best else "$info"), (glyphs("░" * (bar - full)), "$muted"),
            " *" if step in best else "",
        )  # fmt: skip


def sample_lines(watch: RunWatch, width: int, glyphs: Glyphs, back: int = 0) -> Iterator[Content]:
    """Yield the samples of the last evaluation, or those `back` before: a heading, then each prompt, and below it the
    answer beside its reference if it has one. Nothing if there are none."""
    history = sample_history(watch)
    if not history:
        return
    at = max(0, len(history) - 1 - back)
    step, samples = history[at]
    of = f"  ({at + 1} of {len(history)}; [ ] turn)" if len(history) > 1 else ""
    beside = ", and references" if any("reference" in sample for sample in samples) else ""
    yield Content.assemble(
        (f" answers of {'the base model' if step == 0 else f'step {step:,}'}{beside}", "bold"), (of, "$muted")
    )
    half = max(10, (width - 5) // 2)
    for sample in samples:
        prompt = str(sample.get("prompt", ""))
        yield Content.styled(f"  {clean(prompt)}{glyphs(SPACE) if prompt.endswith(' ') else ''}", "$muted")
        answer = str(sample.get("answer", ""))
        if "reference" not in sample:
            yield from (Content(f"  {line}") for line in _wrapped(answer, max(10, width - 4)))
            continue
        reference = str(sample["reference"])
        mark, style = ("=", "$good") if answer == reference else (" ", "")
        left, right = (_wrapped(text, half) for text in (answer, reference))
        for row in range(max(len(left), len(right))):
            one, other = (part[row] if row < len(part) else "" for part in (left, right))
            first = mark if row == 0 else " "
            padded = Content(one).pad_right(max(0, half - Content(one).cell_length))
            yield Content.assemble("  ", Content.styled(padded.plain, style), f" {first} ", (other, "$info"))


def sample_history(watch: RunWatch) -> list[tuple[int, list[dict[str, Any]]]]:
    """(step, samples) of every evaluation with samples: those during training, then those of `tunedeck eval`, each by
    step."""
    during = [(int(event["step"]), list(event["samples"])) for event in watch.state.evals if event.get("samples")]
    scored = sorted((each for each in watch.evaluations if each.samples), key=lambda each: (each.step, each.time))
    return [*during, *((each.step, list(each.samples)) for each in scored)]


def _wrapped(text: str, width: int) -> list[str]:
    """A text in lines of at most `width` cells, at most MOST_LINES of them; empty texts are shown as such."""
    shown = clean(text) or "(empty)"
    lines = [part.plain for part in Content(shown).wrap(width)]
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], f"{lines[MOST_LINES - 1][: width - 2]} …"]
