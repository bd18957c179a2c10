"""The gate of scripts: `compare --fail-if "exact_match < -1%"` fails if a score changed by more than it may."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from engine.errors import UsageError
from engine.journal.directory import RunDirectory
from engine.journal.event_text import format_score
from engine.journal.score_groups import Gain, Gains, gains, lower_is_better

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
            expected="METRIC < NUMBER or METRIC > NUMBER, of the change from the reference; a % sign may follow",
            fix='--fail-if "exact_match < -1%"',
        )
    metric, sign, number, percent = found.groups()
    return Condition(text.strip(), metric, sign[0] == "<", "=" in sign, float(number), bool(percent))


def failures(directories: Sequence[RunDirectory], conditions: Sequence[Condition], against: str) -> list[Failure]:
    """The conditions that are true of a run's change over `against`, a run's name or "base".

    Where the bound tolerates a loss and the score has a 95 % interval, a change whose interval includes 0 may be chance
    and fails nothing. Raises UsageError if a score of the reference or of every run is not known on the same samples.
    """
    found = []
    for condition in conditions:
        compared = gains(directories, condition.metric, against)
        found += [
            Failure(condition.text, row.run, _sentence(condition, row, compared))
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


def _sentence(condition: Condition, row: Gain, compared: Gains) -> str:
    value, reference = (format_score(condition.metric, each) for each in (row.value, compared.reference))
    text = f"{row.run}: {condition.metric} is {value}, and {compared.against} has {reference}"
    if row.low is None or row.high is None:
        return f"{text} (no interval: the values of single samples are not known)"
    return f"{text} (95 % interval of the gain {row.low:+.4g} to {row.high:+.4g})"
