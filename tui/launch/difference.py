"""What differs between the choice and the newest earlier run of the same recipe, setting by setting.

Try: `tunedeck -p demo -r demo` after a run of the demo, then `]` until "difference"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from textual.content import Content

from engine.config.schema.run import RunSpec
from engine.journal.directory import RunDirectory, nested, read_spec
from engine.journal.event_text import clean
from engine.journal.index import list_runs
from tui.launch.fields import format_value

MOST_RUNS = 200
"""Newest runs that are searched: reading the settings of one takes about a millisecond."""

NOT_COMPARED = ("title", "notes", "name", "schema", "kind")
"""Keys that change nothing about a run."""


def last_run_of(recipe: str, runs_dir: Path) -> RunDirectory | None:
    """The newest run in `runs_dir` that was made from the recipe called `recipe`; None if there is none."""
    try:
        runs = list_runs(runs_dir)[:MOST_RUNS]
    except OSError:
        return None
    return next((run for run in runs if nested(read_spec(run), "recipe", "name") == recipe), None)


def differences(spec: RunSpec, earlier: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """{key: (value in the earlier run, value now)} for each setting that differs; `earlier` is the earlier run's
    run.toml. A value that is not set is an empty text."""
    now = spec.model_dump(mode="json", by_alias=True)
    pairs = {}
    for table in ("recipe", "profile"):
        before, after = (dict(_flat(found.get(table) or {}, "")) for found in (earlier, now))
        for key in sorted(before.keys() | after.keys()):
            values = (before.get(key, ""), after.get(key, ""))
            if values[0] != values[1]:
                pairs[key] = values
    return pairs


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield dotted keys with values as text; entries of a list of tables are named by their `name`."""
    for key, value in table.items():
        place = f"{prefix}{key}"
        if value is None or value in ([], {}) or place in NOT_COMPARED:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{place}.")
        elif isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
            for number, entry in enumerate(value):
                yield from _flat(entry, f"{place}.{entry.get('name', number)}.")
        else:
            yield place, format_value(value)


def difference_lines(spec: RunSpec | None, runs_dir: Path | None, width: int) -> list[Content]:
    """The differences as lines of at most `width` cells, or the sentence that says why there are none."""
    if spec is None or runs_dir is None:
        return Content.styled("the settings have errors; nothing to compare", "$muted").wrap(width)
    run = last_run_of(spec.recipe.name, runs_dir)
    if run is None:
        return Content.styled(f"no earlier run of {clean(spec.recipe.name)} in this folder", "$muted").wrap(width)
    found = differences(spec, read_spec(run))
    head = f"{len(found)} setting{'s' * (len(found) != 1)} differ{'s' * (len(found) == 1)} from {clean(run.name)}"
    lines = Content.styled(head if found else f"the same settings as {clean(run.name)}", "$muted").wrap(width)
    for key, (before, after) in found.items():
        line = Content.assemble(
            clean(key), "  ", (clean(before) or "not set", "$muted"), " -> ", (clean(after) or "not set", "bold")
        )
        lines += line.wrap(width)
    return lines
