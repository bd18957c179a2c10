"""Compares runs: the settings that differ, the scores, and the best run for each score.

Pure functions from summaries and specs to a `Comparison`; `compare_rows.py` makes the rows of a table of it.

Try: `tunedeck compare RUN RUN`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.journal.directory import RunDirectory
from engine.journal.evaluations import Evaluation, read_evaluations
from engine.journal.event_text import format_number
from engine.journal.score_groups import ScoreGroup, best_of, score_groups
from engine.journal.summary import RunSummary, read_spec, summarise

BEST = "best_"
"""Beginning of a score's name that is the best value of a metric over the evaluations of a run, not the latest one."""

SCORING_KEYS = ("evaluate.", "eval.")
"""Beginnings of keys that say how a run is scored, and change nothing of what it learns."""

NOT_COMPARED = ("name", "title", "notes", "schema", "kind", "provenance", "limits")
"""Keys of a run spec's outer tables that name, describe or limit a run without changing what it does."""


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs. Every list of values has one entry per run, in the order of `runs`; None where the run has
    no such value."""

    runs: list[str]
    statuses: list[str]
    scores: dict[str, list[float | None]]
    """Maps a score's name to its values: "best_loss" (the best evaluation by checkpoint.best_metric, which may be
    another than the loss), latest evaluation, training loss, speed, memory, time."""
    settings: dict[str, list[Any]]
    """Maps the dotted key of each setting that differs between the runs to its values."""
    best: dict[str, list[str]]
    """Maps a score to the best runs: several on a draw, none if fewer than two runs have the score or all are equal."""
    warnings: list[str]
    groups: list[ScoreGroup] = field(default_factory=list)
    """Scores of `tunedeck eval`, by samples."""
    sentence: str = ""
    """Names the best run by checkpoint.best_metric over all evaluations inside training; empty if there is none, or if
    the runs have different metrics there."""

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON document."""
        return asdict(self)


def compare(directories: Sequence[RunDirectory]) -> Comparison:
    """Compare runs, after reading the summary and the spec of each from its directory."""
    return compare_summaries(
        [summarise(directory) for directory in directories],
        [read_spec(directory) for directory in directories],
        [read_evaluations(directory) for directory in directories],
    )


def compare_summaries(
    summaries: Sequence[RunSummary], specs: Sequence[dict[str, Any]], evaluations: Sequence[Sequence[Evaluation]]
) -> Comparison:
    """Compare runs by their summaries, resolved specs and evaluations, each with one entry per run in the same
    order."""
    names = [summary.run for summary in summaries]
    columns = [_scores(summary) for summary in summaries]
    scores = {key: [column.get(key) for column in columns] for key in dict.fromkeys(key for c in columns for key in c)}
    eligible = {key: [value if summary.step else None for value, summary in zip(values, summaries, strict=True)]
              for key, values in scores.items()}  # fmt: skip
    settings = _differing(specs)
    return Comparison(
        runs=names,
        statuses=[summary.status for summary in summaries],
        scores=scores,
        settings={key: values for key, values in settings.items() if not key.startswith(SCORING_KEYS)},
        best={
            key: winners
            for key, values in eligible.items()
            if key not in UNRANKED and (winners := best_of(key.removeprefix(BEST), names, values))
        },
        warnings=_warnings(summaries, settings),
        groups=score_groups(names, evaluations),
        sentence=_sentence(summaries),
    )


def best_runs(summaries: Sequence[RunSummary]) -> list[RunSummary]:
    """The runs with the best evaluation inside training by checkpoint.best_metric, several on a draw. Empty if fewer
    than two runs have one, if all are equal, or if the runs have different metrics there."""
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
        "seconds": summary.seconds,
        "peak_bytes": measured,
        "step": summary.step,
        "backoffs": summary.backoffs,
        "samples_lost": summary.samples_lost,
    }
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


UNRANKED = frozenset({"step", "backoffs", "samples_lost"})
"""Scores of which no value is best."""


def _differing(specs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Map the dotted key of every setting that differs to its value in each run; the keys of a sweep come first."""
    swept = {key for spec in specs for key in spec.get("provenance", {}).get("sweep", {}).get("point", {})}
    flat = [dict(flatten_settings(spec)) for spec in specs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = {key: [one.get(key) for one in flat] for key in keys}
    differing = {key: values for key, values in rows.items() if any(value != values[0] for value in values)}
    return dict(sorted(differing.items(), key=lambda row: row[0] not in swept))


def flatten_settings(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every setting; entries of a list of tables are addressed by name, as --set does."""
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
        warnings.append("the runs were not evaluated on the same samples, so their scores do not compare")
    if len({summary.simulated for summary in summaries}) > 1:
        warnings.append("some runs were on a simulated device, so speed and memory do not compare")
    unfinished = [summary.run for summary in summaries if summary.status != "done"]
    if unfinished and len({summary.step for summary in summaries}) > 1:
        warnings.append(f"not done, so compared at different steps: {', '.join(unfinished)}")
    return warnings
