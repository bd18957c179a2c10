"""What is told of each allocation failure: one event, and a report on who held the memory."""

from __future__ import annotations

from collections.abc import Callable

from engine.device.base import Device
from engine.train.monitor.journal import Journal
from engine.train.recovery.oom_report import OomReports
from engine.train.step.context import Backoff


def reporter(journal: Journal, device: Device, reports: OomReports | None = None) -> Callable[[Backoff], None]:
    """What the step transaction and everything beside it call with each failure."""

    def report(backoff: Backoff) -> None:
        failure, remedy = backoff.failure, backoff.remedy
        facts = {"remedy": remedy.name, "before": remedy.before, "after": remedy.after, "attempt": backoff.attempt}
        journal.write(
            "backoff",
            step=backoff.step,
            phase=failure.phase,
            failed_rank=backoff.failed_rank,
            cause=failure.kind,
            requested_bytes=failure.requested_bytes,
            allocated_bytes=failure.allocated_bytes,
            reserved_bytes=failure.reserved_bytes,
            capacity_bytes=device.capacity_bytes,
            **facts,
            **_sequences(backoff),
        )
        if remedy.name == "max_length":
            journal.warn(
                "learning_changed",
                f"from step {backoff.step} on sequences end after {remedy.after} tokens: not even one whole one fits",
                "more memory, or data.max_length as short from the start",
            )
        path = reports.write({"step": backoff.step, **facts}, failure, backoff.micro_batch) if reports else None
        if path is not None:
            journal.write("oom_report", step=backoff.step, path=path)

    return report


def _sequences(backoff: Backoff) -> dict[str, int]:
    """How many at a time, before and after; only where that is known."""
    if backoff.rows_before is None or backoff.rows_after is None:
        return {}
    return {"sequences_before": backoff.rows_before, "sequences_after": backoff.rows_after}
