"""A comparison of runs as the rows of a table, in words and with units: one order for the command line and the console.

Settings that differ come first, then the scores of `tunedeck eval`, then what the runs recorded while they trained.

Try: `for row in comparison_rows(compare(runs)): print(row)`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.journal.compare import BEST, Comparison
from engine.journal.event_text import clean, format_bytes, format_duration, format_score
from engine.journal.score_groups import ScoreGroup

LABELS = {
    "loss": "evaluation loss",
    "train_loss": "training loss",
    "tokens_per_second": "tokens/s",
    "seconds": "time",
    "peak_bytes": "peak memory",
    "step": "steps",
    "backoffs": "out of memory, times",
    "samples_lost": "samples lost",
}
"""The names of scores that are not their keys with spaces for underscores."""

COST_KEYS = ("train_loss", "tokens_per_second", "seconds", "peak_bytes", "step", "backoffs", "samples_lost")
"""The scores that say how the training went, and not how good the model is; in the order of their rows."""


class CompareRow(NamedTuple):
    """A row of the table: a heading without cells, or a label and a cell for each run."""

    label: str
    cells: Sequence[str] = ()
    best: Sequence[bool] = ()
    """For each run, whether its cell is the best of the row; empty where no value is better than another."""


def comparison_rows(found: Comparison, metric: str | None = None) -> Iterator[CompareRow]:
    """Yield all rows of a comparison. With `metric`, the scores on each set of samples end with rows of its value at
    each checkpoint."""
    yield from setting_rows(found)
    yield from score_rows(found, metric)
    yield from training_rows(found)


def setting_rows(found: Comparison) -> Iterator[CompareRow]:
    """Yield the rows of the settings that differ."""
    yield CompareRow("settings that differ" if found.settings else "no setting differs")
    for key, values in found.settings.items():
        yield CompareRow(clean(key), [format_setting(value) for value in values])


def score_rows(found: Comparison, metric: str | None = None) -> Iterator[CompareRow]:
    """Yield the rows of the scores of `tunedeck eval`, on one set of samples after another."""
    for group in found.groups:
        yield from _group_rows(group, found.runs, metric)


def training_rows(found: Comparison) -> Iterator[CompareRow]:
    """Yield the rows of what the runs recorded while they trained: evaluations first, then what it took."""
    evaluated = [key for key in found.scores if key not in COST_KEYS]
    if evaluated:
        yield CompareRow("evaluation while training")
        yield from (_score_row(key, found.scores[key], found.best, found.runs) for key in evaluated)
    yield CompareRow("training")
    yield from (_score_row(key, found.scores[key], found.best, found.runs) for key in COST_KEYS if key in found.scores)


def _group_rows(group: ScoreGroup, runs: Sequence[str], metric: str | None) -> Iterator[CompareRow]:
    """The scores of `tunedeck eval` on one set of samples."""
    yield CompareRow(f"scored on {clean(group.title)}")
    yield CompareRow("checkpoint", ["-" if step is None else f"step {step:,}" for step in group.steps])
    for name, values in group.metrics.items():
        yield _score_row(name, values, group.best, runs, {"loss": "loss"})
    if metric is not None:
        for step in sorted({step for one in group.checkpoints for step in one}):
            cells = [format_cell(metric, one.get(step, {}).get(metric)) for one in group.checkpoints]
            yield CompareRow(f"{score_label(metric)}, {f'step {step:,}' if step else 'base'}", cells)


def _score_row(
    key: str, values: Sequence[float | None], best: Mapping[str, Sequence[str]], runs: Sequence[str],
    labels: Mapping[str, str] | None = None,
) -> CompareRow:  # fmt: skip
    winners = best.get(key, ())
    label = (labels or {}).get(key) or score_label(key)
    cells = [format_cell(key.removeprefix(BEST), value) for value in values]
    return CompareRow(label, cells, [run in winners for run in runs] if winners else ())


def score_label(key: str) -> str:
    """The name of a score in words: "exact match", "best evaluation loss", "peak memory"."""
    name = key.removeprefix(BEST)
    words = LABELS.get(name) or clean(name).replace("_", " ")
    return words if name == key else f"best {words}"


def format_cell(key: str, value: float | None) -> str:
    """The value of a score with its unit; "-" for None."""
    if value is None:
        return "-"
    if key == "seconds":
        return format_duration(value)
    return format_bytes(value) if key.endswith("_bytes") else format_score(key, value)


def format_setting(value: Any) -> str:
    """Format the value of a setting for a table, as a recipe has it; "-" for None."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
