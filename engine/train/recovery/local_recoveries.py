"""Allocation failures that a rank recovers from by itself: while it loads, prepares a step, or undoes a failed one.

No other rank takes part in such a recovery. But the journal has a line for every failure, and only rank 0 writes it, so
the other ranks keep their failures until the next exchange between the ranks.

Try: `pytest tests/train/recovery/test_local_recoveries.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.train.recovery.records import RankOom, RecoveredOom

MOST = 8
"""Failures sent at a time; the rest is sent at the next exchange. What a rank sends has limited room."""

TEXT_CHARACTERS = 400


class LocalRecoveries:
    """Collects the failures that this rank recovered from alone, until rank 0 has written them to the journal."""

    def __init__(self, ranks: Ranks, record: Callable[[RecoveredOom], None]) -> None:
        """`record` writes a failure to the journal; it is called on rank 0 alone."""
        self._ranks, self._record = ranks, record
        self._kept: list[RecoveredOom] = []

    def note(self, failure: OutOfMemory, remedy: str, attempt: int, *, step: int = 0) -> None:
        """Record a failure on this rank from which it recovered by `remedy`; `attempt` is the number of the attempt
        that failed, from 1, and `step` the step it belongs to, 0 outside of steps. Rank 0 writes it to the journal at
        once, other ranks keep it until `take`."""
        recovered = RecoveredOom(step, RankOom(failure, self._ranks.rank), remedy, attempt, rows_after=0)
        if self._ranks.is_rank0:
            self._record(recovered)
        else:
            self._kept.append(recovered)

    def take(self) -> list[dict[str, Any]]:
        """Remove and return the failures of this rank that have not been sent to rank 0 yet, as JSON for the next
        exchange."""
        now, self._kept = self._kept[:MOST], self._kept[MOST:]
        return [_as_json(recovered) for recovered in now]

    def record(self, received: Sequence[list[dict[str, Any]]]) -> None:
        """On rank 0: write the failures that every rank sent to the journal, in the order of ranks."""
        if self._ranks.is_rank0:
            for sent in (each for failures in received for each in failures):
                self._record(RecoveredOom(**{**sent, "oom": RankOom.from_json(sent["oom"])}))


def _as_json(recovered: RecoveredOom) -> dict[str, Any]:
    failure = replace(recovered.oom.failure, held=None, text=recovered.oom.failure.text[:TEXT_CHARACTERS])
    return {**vars(recovered), "oom": replace(recovered.oom, failure=failure).as_json()}
