"""The built-in source `builtin:dates`: dates in various notations, to be rewritten as ISO dates.

Rows are generated from a seed, so the demo needs no file and no network. Training and validation share the notations,
but no date. Every notation spells the month, because 5/3/2021 would have two readings.

Try: `python -c "from engine.data.builtin import dates; print(dates(0, 'train')[:5])"`
"""

from __future__ import annotations

import datetime
import random
from typing import TypedDict

FIRST_DAY = datetime.date(1950, 1, 1)
LAST_DAY = datetime.date(2049, 12, 31)

ROWS = {"train": 20_000, "validation": 256}
"""Rows of each split."""

VALIDATION_DAYS = 2_000
"""Days reserved for validation; no training row uses one."""

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
"""Notations of a date."""


class DateRow(TypedDict):
    """One row: a date in some notation, and as an ISO date."""

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
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)
