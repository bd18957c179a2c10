"""Compares runs: the settings that differ, the scores, the best run for each score, the rows of the table that shows
it, and whether a score changed by more than a script allows (`compare --fail-if "exact_match < -1%"`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from engine.errors import UsageError
from engine.journal.directory import RunDirectory, read_spec
from engine.journal.evaluations import Evaluation, read_evaluations
from engine.journal.event_text import clean, format_bytes, format_duration, format_number, format_score
from engine.journal.score_groups import Gain, Gains, ScoreGroup, best_of, gains, lower_is_better, score_groups
from engine.journal.summary import RunSummary, summarise

BEST = "best_"
"""Beginning of a score's name that is a metric's best value over the evaluations of a run, not the latest one."""

SCORING_KEYS = ("evaluate.", "eval.")
"""Keys that say how a run is scored, and change nothing of what it learns."""

NOT_COMPARED = ("name", "title", "notes", "schema", "kind", "provenance", "limits")
"""Outer keys that name, describe or limit a run without changing what it does."""


@dataclass(frozen=True)
class Comparison:
    """Lists have one entry per run, in the order of `runs`; None where a run has no such value."""

    runs: list[str]
    statuses: list[str]
    scores: dict[str, list[float | None]]
    """By name: "best_loss" (the best evaluation by checkpoint.best_metric, which may not be the loss), latest
    evaluation, training loss, speed, memory, time of all starts."""
    settings: dict[str, list[Any]]
    """Those that differ between the runs, by dotted key."""
    best: dict[str, list[str]]
    """The best runs by score: several on a draw, none if fewer than two runs have the score or all are equal."""
    warnings: list[str]
    groups: list[ScoreGroup] = field(default_factory=list)
    sentence: str = ""
    """Names the best run by checkpoint.best_metric over all evaluations inside training; empty if there is none, or if
    the runs have different metrics there."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    directories: Sequence[RunDirectory], summary_of: Callable[[RunDirectory], RunSummary] = summarise
) -> Comparison:
    return compare_summaries(
        [summary_of(directory) for directory in directories],
        [read_spec(directory) for directory in directories],
        [read_evaluations(directory) for directory in directories],
    )


def compare_summaries(
    summaries: Sequence[RunSummary], specs: Sequence[dict[str, Any]], evaluations: Sequence[Sequence[Evaluation]]
) -> Comparison:
    names = [summary.run for summary in summaries]
    columns = [_scores(summary) for summary in summaries]
    scores = {key: [column.get(key) for column in columns] for key in dict.fromkeys(key for c in columns for key in c)}
    eligible = {key: [value if summary.step else None for value, summary in zip(values, summaries, strict=True)]
              for key, values in scores.items()}  # fmt: skip
    settings = _differing(specs)
    objectives_differ = any(map(_sets_objective, settings))
    unranked = {*UNRANKED, *((*LOSSES, *(BEST + key for key in LOSSES)) if objectives_differ else ())}
    if any(summary.status != "done" for summary in summaries):
        unranked.add("seconds")  # the least time would be that of a run that had only begun
    return Comparison(
        runs=names,
        statuses=[summary.status for summary in summaries],
        scores=scores,
        settings={key: values for key, values in settings.items() if not key.startswith(SCORING_KEYS)},
        best={
            key: winners
            for key, values in eligible.items()
            if key not in unranked and (winners := best_of(key.removeprefix(BEST), names, values))
        },
        warnings=_warnings(summaries, settings),
        groups=score_groups(names, evaluations),
        sentence="" if objectives_differ else _sentence(summaries),
    )


def best_runs(summaries: Sequence[RunSummary]) -> list[RunSummary]:
    """The runs with the best evaluation inside training, several on a draw. Empty if fewer than two runs have one, all
    are equal, or their checkpoint.best_metric differ."""
    scored = [(summary, summary.best) for summary in summaries if summary.best is not None]
    metrics = {best.metric for _, best in scored}
    if len(metrics) != 1:
        return []
    winners = best_of(metrics.pop(), [summary.path for summary, _ in scored], [best.value for _, best in scored])
    return [summary for summary, _ in scored if summary.path in winners]


def _sentence(summaries: Sequence[RunSummary]) -> str:
    named = [(summary.run, summary.best) for summary in best_runs(summaries) if summary.best is not None]
    runs = ", ".join(f"{run} ({format_number(best.value)} at step {best.step})" for run, best in named)
    return f"best by {named[0][1].metric} (checkpoint.best_metric): {runs}" if named else ""


def _scores(summary: RunSummary) -> dict[str, float]:
    measured = summary.measured.get("peak_bytes")
    best = summary.best
    found = {
        **({f"{BEST}{best.metric}": best.value} if best is not None else {}),
        **summary.metrics,
        "seconds": summary.total_seconds,
        "peak_bytes": measured,
        "step": summary.step,
        "backoffs": summary.backoffs,
        "samples_lost": summary.samples_lost,
    }
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


UNRANKED = frozenset({"step", "backoffs", "samples_lost"})

LOSSES = ("loss", "train_loss", "rewards_margin")
OBJECTIVE_KEYS = frozenset({"method.objective", "preference.loss", "preference.beta"})
"""Settings that decide what the loss and the rewards are: runs that differ in them have LOSSES on scales of their
own."""


def _sets_objective(key: str) -> bool:
    """Also of a stage, stages.NAME.KEY."""
    return (key.split(".", 2)[-1] if key.startswith("stages.") else key) in OBJECTIVE_KEYS


def _differing(specs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Settings by dotted key, with a value for each run; the keys of a sweep come first."""
    swept = {key for spec in specs for key in spec.get("provenance", {}).get("sweep", {}).get("point", {})}
    flat = [dict(flatten_settings(spec)) for spec in specs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = {key: [one.get(key) for one in flat] for key in keys}
    differing = {key: values for key, values in rows.items() if any(value != values[0] for value in values)}
    return dict(sorted(differing.items(), key=lambda row: row[0] not in swept))


def flatten_settings(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting; entries of a list of tables are addressed by name, as --set does."""
    for key, value in table.items():
        if key in NOT_COMPARED and prefix in ("", "profile."):
            continue
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten_settings(value, "" if path == "recipe" else f"{path}.")
        elif isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            for number, entry in enumerate(value):
                yield from flatten_settings(entry, f"{path}.{entry.get('name', number)}.")
        else:
            yield path, value


def _warnings(summaries: Sequence[RunSummary], settings: dict[str, list[Any]]) -> list[str]:
    warnings = []
    evaluation_keys = ("data.validation.", "data.valid_fraction", "eval.limit")
    if any(key.startswith(evaluation_keys) for key in settings):
        warnings.append("the runs were evaluated on different samples, so their scores cannot be compared")
    if any(map(_sets_objective, settings)):
        warnings.append("the runs have different objectives, so their losses and rewards cannot be compared")
    if len({summary.simulated for summary in summaries}) > 1:
        warnings.append("some runs used a simulated device, so speed and memory cannot be compared")
    unfinished = [summary.run for summary in summaries if summary.status != "done"]
    if unfinished and len({summary.step for summary in summaries}) > 1:
        warnings.append(f"not finished, so compared at different steps: {', '.join(unfinished)}")
    return warnings


LABELS = {
    "loss": "evaluation loss",
    "train_loss": "training loss",
    "tokens_per_second": "tokens/s",
    "seconds": "total time of all starts",
    "peak_bytes": "peak memory",
    "step": "steps",
    "backoffs": "out-of-memory events",
    "samples_lost": "samples lost",
}
"""Names of scores that are not their keys with spaces for underscores."""

COST_KEYS = ("train_loss", "tokens_per_second", "seconds", "peak_bytes", "step", "backoffs", "samples_lost")
"""Scores that say how the training went, not how good the model is; in the order of their rows."""


class CompareRow(NamedTuple):
    """A row of the table: a heading without cells, or a label and a cell for each run."""

    label: str
    cells: Sequence[str] = ()
    best: Sequence[bool] = ()
    """Whether each run's cell is the best of the row; empty where no value is better than another."""


def comparison_rows(found: Comparison, metric: str | None = None) -> Iterator[CompareRow]:
    """With `metric`, the scores on each set of samples end with rows of its value at each checkpoint."""
    yield from setting_rows(found)
    yield from score_rows(found, metric)
    yield from training_rows(found)


def setting_rows(found: Comparison) -> Iterator[CompareRow]:
    yield CompareRow("settings that differ" if found.settings else "all settings are the same")
    for key, values in found.settings.items():
        yield CompareRow(clean(key), [format_setting(value) for value in values])


def score_rows(found: Comparison, metric: str | None = None) -> Iterator[CompareRow]:
    for group in found.groups:
        yield from _group_rows(group, found.runs, metric)


def training_rows(found: Comparison) -> Iterator[CompareRow]:
    """Evaluations first, then what training took."""
    evaluated = [key for key in found.scores if key not in COST_KEYS]
    if evaluated:
        yield CompareRow("evaluation while training")
        yield from (_score_row(key, found.scores[key], found.best, found.runs) for key in evaluated)
    yield CompareRow("training")
    yield from (_score_row(key, found.scores[key], found.best, found.runs) for key in COST_KEYS if key in found.scores)


def _group_rows(group: ScoreGroup, runs: Sequence[str], metric: str | None) -> Iterator[CompareRow]:
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
    """In words: "exact match", "best evaluation loss", "peak memory"."""
    name = key.removeprefix(BEST)
    words = LABELS.get(name) or clean(name).replace("_", " ")
    return words if name == key else f"best {words}"


def format_cell(key: str, value: float | None) -> str:
    """With its unit; "-" for None."""
    if value is None:
        return "-"
    if key == "seconds":
        return format_duration(value)
    if key == "tokens_per_second" and value >= 100:
        return f"{value:,.0f}"
    return format_bytes(value) if key.endswith("_bytes") else format_score(key, value)


def format_setting(value: Any) -> str:
    """As a recipe has it; "-" for None."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


CONDITION = re.compile(r"\s*([^\s<>=]+)\s*(<=|>=|<|>)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(%?)\s*\Z", re.I)


class Condition(NamedTuple):
    """What must not be true of a score's change, the run's value minus the reference's."""

    text: str
    metric: str
    below: bool
    """Whether a change below the bound fails; else a change above it."""
    inclusive: bool
    bound: float
    percent: bool
    """The bound is in points of a score from 0 to 1, or in per cent of the reference for scores that are better when
    they are lower (loss, perplexity)."""

    def holds(self, change: float, reference: float) -> bool:
        bound = self.bound
        if self.percent:
            bound *= (abs(reference) if lower_is_better(self.metric) else 1.0) / 100
        if change == bound:
            return self.inclusive
        return change < bound if self.below else change > bound

    @property
    def tolerates_worse(self) -> bool:
        """Whether the bound is a loss that is tolerated, not a gain that is demanded."""
        return (self.bound > 0) if lower_is_better(self.metric) else (self.bound < 0)


class Failure(NamedTuple):
    condition: str
    run: str
    sentence: str


def parse_condition(text: str) -> Condition:
    """Raises UsageError for anything but METRIC < NUMBER, with >, <=, >=, and perhaps a % sign."""
    found = CONDITION.match(text)
    if found is None:
        raise UsageError(
            f"--fail-if {text!r} is not a condition",
            expected="METRIC < NUMBER or METRIC > NUMBER, the change from the reference; NUMBER may end with %",
            fix='--fail-if "exact_match < -1%"',
        )
    metric, sign, number, percent = found.groups()
    return Condition(text.strip(), metric, sign[0] == "<", "=" in sign, float(number), bool(percent))


def failures(directories: Sequence[RunDirectory], conditions: Sequence[Condition], against: str) -> list[Failure]:
    """The conditions that are true of a run's change over `against`, a run's name or "base".

    Where the bound tolerates a loss and the score has a 95 % interval, a change whose interval includes 0 may be chance
    and fails nothing. Raises UsageError if a score of the reference or of every run is unknown on the same samples.
    """
    found = []
    for condition in conditions:
        compared = gains(directories, condition.metric, against)
        found += [
            Failure(condition.text, row.run, _failure_sentence(condition, row, compared))
            for row in compared.rows
            if _fails(condition, row, compared.reference)
        ]
    return found


def _fails(condition: Condition, row: Gain, reference: float) -> bool:
    change = row.value - reference
    if not condition.holds(change, reference):
        return False
    if row.low is None or row.high is None or not condition.tolerates_worse:
        return True
    return row.high < 0


def _failure_sentence(condition: Condition, row: Gain, compared: Gains) -> str:
    value, reference = (format_score(condition.metric, each) for each in (row.value, compared.reference))
    text = f"{row.run}: {condition.metric} is {value}; {compared.against} has {reference}"
    if row.low is None or row.high is None:
        return f"{text} (no interval: there are no values per sample)"
    return f"{text} (95 % interval of the gain {row.low:+.4g} to {row.high:+.4g})"
