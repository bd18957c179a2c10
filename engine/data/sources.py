"""Opens the rows of a source: a built-in generator, or files and data sets that `engine.data.dataset_files` reads."""

from __future__ import annotations

import datetime
import random
from dataclasses import replace
from typing import TypedDict

from engine.config.files.find import BUILTIN_PREFIX
from engine.config.schema.data import Source
from engine.config.schema.run import DATA_VERSION
from engine.data.records import SourceRows, no_rows, split_name
from engine.data.store import hash_text
from engine.errors import DataError

FIRST_DAY = datetime.date(1950, 1, 1)
LAST_DAY = datetime.date(2049, 12, 31)

ROWS = {"train": 20_000, "validation": 256}

VALIDATION_DAYS = 2_000
"""No training row uses one of these days."""

FORMS = (
    "{day} {month} {year}",
    "{day} {short} {year}",
    "the {day} of {month} {year}",
    "the {ordinal} of {month} {year}",
    "{month} {ordinal}, {year}",
    "{month} {day}, {year}",
    "{short} {day} {year}",
    "on {day} {short} {year}",
)
"""Training and validation share the notations, but no date. Each spells the month: 5/3/2021 would have two readings."""


class DateRow(TypedDict):
    """A date in some notation, and as an ISO date."""

    prompt: str
    completion: str


def dates(seed: int, split: str) -> list[DateRow]:
    """The rows of "train" or "validation", a pure function of the arguments. Raises KeyError for another split."""
    days = list(range((LAST_DAY - FIRST_DAY).days + 1))
    random.Random(f"days {seed}").shuffle(days)
    pool = {"validation": days[:VALIDATION_DAYS], "train": days[VALIDATION_DAYS:]}[split]
    draw = random.Random(f"forms {split} {seed}")
    return [_row(FIRST_DAY + datetime.timedelta(pool[row % len(pool)]), draw) for row in range(ROWS[split])]


def _row(date: datetime.date, draw: random.Random) -> DateRow:
    # Not strftime, which names months in the machine's locale.
    month = MONTHS[date.month - 1]
    written = draw.choice(FORMS).format(
        day=date.day, ordinal=_ordinal(date.day), month=month, short=month[:3], year=date.year
    )
    return {"prompt": f"{written} -> ", "completion": date.isoformat()}


def _ordinal(number: int) -> str:
    suffix = "th" if number in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


MONTHS = (
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
)


def open_rows(source: Source, *, seed: int, skip_broken: bool = False, version: int = DATA_VERSION) -> SourceRows:
    """Applies the source's `limit`. `seed` is used by built-in generators only, `skip_broken` (`data.broken = "skip"`)
    and `version` (`RunSpec.data_version`) by files.

    Raises DataError: missing, unreadable or empty; EnvironmentProblem: unreachable hub.
    """
    rows = _open_builtin(source, seed) if _is_builtin(source) else _open_data_set(source, skip_broken, version)
    if rows.count == 0:
        raise no_rows(source)
    if source.limit is None:
        return rows
    return replace(rows, count=min(rows.count, source.limit), in_files=rows.available)


def _is_builtin(source: Source) -> bool:
    return source.path is not None and source.path.startswith(BUILTIN_PREFIX)


def _open_data_set(source: Source, skip_broken: bool, version: int) -> SourceRows:
    from engine.data.dataset_files import open_data_set  # imported here: `datasets` takes a second, built-in rows none

    return open_data_set(source, skip_broken=skip_broken, version=version)


def _open_builtin(source: Source, seed: int) -> SourceRows:
    base = split_name(source)
    if source.path != "builtin:dates" or base not in ROWS:
        raise DataError(
            f"source {source.name}: {source.path} has no split {source.split}",
            expected=f"builtin:dates with split {' or '.join(ROWS)}, or a slice of it such as train[:1000]",
        )
    rows = dates(seed, base)
    if source.split != base:
        from engine.data.dataset_files import absolute_slice  # imported here, as above

        rows = rows[slice(*absolute_slice(source, len(rows)))]
    # Hash the rows, not the seed: another version of the generator may make other rows.
    fingerprint = hash_text(*(f"{row['prompt']}{row['completion']}" for row in rows))
    return SourceRows(["prompt", "completion"], len(rows), fingerprint, rows)
