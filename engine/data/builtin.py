"""The built-in source `builtin:dates`: dates written the way people write them, to be rewritten as ISO dates.

Generated from a seed, so that the demo needs no file and no network. Training and validation share the ways of writing
but not a single date. Every form names the month in letters: 5/3/2021 would have two answers.

Try: `python -c "from engine.data.builtin import dates; print(dates(0, 'train')[:5])"`
"""

from __future__ import annotations

import datetime
import random
from typing import TypedDict

FIRST_DAY = datetime.date(1950, 1, 1)
LAST_DAY = datetime.date(2049, 12, 31)

ROWS = {"train": 20_000, "validation": 256}
"""Splits and how many rows each has."""

VALIDATION_DAYS = 2_000
"""Days set aside; no training row shows one of them."""

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
"""Ways of writing a date."""


class DateRow(TypedDict):
    """One row: a date as written, and its ISO form."""

    prompt: str
    completion: str


def dates(seed: int, split: str) -> list[DateRow]:
    """The rows of one split, "train" or "validation"; a pure function of its arguments.

    Raises KeyError for another split.
    """
    days = list(range((LAST_DAY - FIRST_DAY).days + 1))
    random.Random(f"days {seed}").shuffle(days)
    pool = {"validation": days[:VALIDATION_DAYS], "train": days[VALIDATION_DAYS:]}[split]
    draw = random.Random(f"forms {split} {seed}")
    return [_row(FIRST_DAY + datetime.timedelta(pool[row % len(pool)]), draw) for row in range(ROWS[split])]


def _row(date: datetime.date, draw: random.Random) -> DateRow:
    # strftime would give the names of the machine's locale.
    month = MONTHS[date.month - 1]
    written = draw.choice(FORMS).format(
        day=date.day, ordinal=_ordinal(date.day), month=month, short=month[:3], year=date.year
    )
    return {"prompt": f"{written} -> ", "completion": date.isoformat()}


def _ordinal(number: int) -> str:
    suffix = "th" if number in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)
