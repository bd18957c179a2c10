"""Compares runs: the settings that differ, the scores, and the best run for each score.

Pure functions from summaries and specs to a `Comparison`, which the command line and the console display.

Try: `tunedeck compare RUN RUN`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.journal.directory import RunDirectory
from engine.journal.event_text import format_bytes, format_number
from engine.journal.summary import RunSummary, read_spec, summarise

LOWER_IS_BETTER = frozenset({"loss", "perplexity", "train_loss", "seconds", "peak_bytes"})
"""Scores whose lowest value is the best; for all other scores the highest is."""

NOT_COMPARED = ("name", "title", "notes", "schema", "kind", "provenance", "limits")
"""Keys of a run spec's outer tables that name, describe or limit a run without changing what it does."""


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs. Every list of values has one entry per run, in the order of `runs`; None where the run has
    no such value."""

    runs: list[str]
    statuses: list[str]
    scores: dict[str, list[float | None]]
    """Maps a score's name to its values: latest evaluation, training loss, speed, memory, time."""
    settings: dict[str, list[Any]]
    """Maps the dotted key of each setting that differs between the runs to its values."""
    best: dict[str, list[str]]
    """Maps a score to the best runs: several on a draw, none if fewer than two runs have the score or all are equal."""
    warnings: list[str]

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON document."""
        return asdict(self)


def compare(directories: Sequence[RunDirectory]) -> Comparison:
    """Compare runs, after reading the summary and the spec of each from its directory."""
    return compare_summaries(
        [summarise(directory) for directory in directories], [read_spec(directory) for directory in directories]
    )


def compare_summaries(summaries: Sequence[RunSummary], specs: Sequence[dict[str, Any]]) -> Comparison:
    """Compare runs by their summaries and resolved specs."""
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
        settings=settings,
        best={key: winners for key, values in eligible.items() if (winners := _best(key, names, values))},
        warnings=_warnings(summaries, settings),
    )


def _scores(summary: RunSummary) -> dict[str, float]:
    measured = summary.measured.get("peak_bytes")
    found = {
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


def _best(key: str, names: Sequence[str], values: Sequence[float | None]) -> list[str]:
    """Names of the runs with the best value for `key`; empty if fewer than two runs have a value, all values are
    equal, or the key is not ranked."""
    known = [value for value in values if value is not None]
    if key in UNRANKED or len(known) < 2 or len(set(known)) == 1:
        return []
    best = min(known) if key in LOWER_IS_BETTER else max(known)
    return [name for name, value in zip(names, values, strict=True) if value == best]


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


def format_setting(value: Any) -> str:
    """Format the value of a setting for a table; "-" for None."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def format_compared_score(key: str, value: float | None, best: bool) -> str:
    """Format a score for a table: the best score is followed by a star, the others by spaces; "-" for None."""
    if value is None:
        return "-"
    return (format_bytes(int(value)) if key.endswith("_bytes") else format_number(value)) + (" *" if best else "  ")


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
