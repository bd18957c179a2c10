"""Allocation failures that a rank outlived by itself: while it loads, prepares a step, or recovers from another one.

The others take no part in these and learn nothing from them, but the journal has a line for every failure, and only
rank 0 writes it. So another rank keeps what happened to it until the ranks speak with each other next.

Try: `pytest tests/distributed/test_replicated_steps.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.train.recovery.ladder import Remedy
from engine.train.step.context import Backoff

MOST = 8
"""Told at a time; the rest comes with the next telling. What a rank says has limited room."""

TEXT_CHARACTERS = 400


class Outlived:
    """This rank's own failures, on their way to the journal."""

    def __init__(self, ranks: Ranks, record: Callable[[Backoff], None]) -> None:
        """`record` writes the journal's line; it is called on rank 0 alone."""
        self._ranks, self._record = ranks, record
        self._kept: list[Backoff] = []

    def note(self, failure: OutOfMemory, remedy: str, number: int, *, step: int = 0) -> None:
        """`failure` struck here, in the attempt of this number; `remedy` is what was done about it."""
        backoff = Backoff(step, failure, Remedy(remedy), 0, 0, number, failed_rank=self._ranks.rank)
        if self._ranks.is_first:
            self._record(backoff)
        else:
            self._kept.append(backoff)

    def take(self) -> list[dict[str, Any]]:
        """What is to be told now (JSON); it is not kept any longer."""
        now, self._kept = self._kept[:MOST], self._kept[MOST:]
        return [_as_json(backoff) for backoff in now]

    def record(self, told: Sequence[list[dict[str, Any]]]) -> None:
        """Have what the ranks told, in their order, in the journal."""
        if self._ranks.is_first:
            for rank, failures in enumerate(told):
                for plain in failures:
                    self._record(_from_json(plain, rank))


def _as_json(backoff: Backoff) -> dict[str, Any]:
    failure = replace(backoff.failure, held=None, text=backoff.failure.text[:TEXT_CHARACTERS])
    return {
        "step": backoff.step, "failure": asdict(failure), "remedy": backoff.remedy.name, "attempt": backoff.attempt
    }  # fmt: skip


def _from_json(told: dict[str, Any], rank: int) -> Backoff:
    failure, remedy = OutOfMemory(**told["failure"]), Remedy(told["remedy"])
    return Backoff(told["step"], failure, remedy, 0, 0, told["attempt"], failed_rank=rank)
