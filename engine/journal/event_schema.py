"""The table of event kinds: the fields that each kind must have, and the fields that it may have.

Data only. The writer checks every event against it, so that a misspelt field fails the first test that writes it. Times
are UTC ISO 8601; steps count optimizer steps from 1. A new kind or field is one line here.
"""

from __future__ import annotations

from typing import NamedTuple

COMMON = frozenset({"seq", "time", "kind", "stage", "rank", "stage_seq"})
"""Fields that only the writer sets: all but `stage_seq` in every event. In the journal of a staged run, `stage` names
the stage that an event comes from, and `stage_seq` is the event's `seq` in that stage's own journal."""

FINAL_STATUSES = ("paused", "done", "stopped", "failed", "oom")
"""Statuses that an engine records in `run_finished`. A run may also be queued, running or stale, which nothing records:
see `engine.journal.summary.status_of`."""


class EventKind(NamedTuple):
    """The names of the fields that events of one kind must have, and of those that they may have."""

    required: frozenset[str]
    optional: frozenset[str]


def _event_kind(required: str = "", optional: str = "") -> EventKind:
    return EventKind(frozenset(required.split()), frozenset(optional.split()))


EVENT_KINDS: dict[str, EventKind] = {
    "run_started": _event_kind(
        "run pid world_size versions",
        "host device device_name simulated capacity_bytes allocator resumed seed parameters trainable",
    ),
    "stage_started": _event_kind(
        "",
        "name max_steps epochs batch_size samples validation_samples tokens target_tokens dropped reasons loss"
        " attention dtype number of from path from_start device_used_bytes device_processes stage_kind",
    ),
    "stage_finished": _event_kind(
        "name status exit_code", "number steps seconds peak_bytes device_used_bytes result reason"
    ),
    "plan": _event_kind(
        "predicted verdict",
        "capacity_bytes deciding_phase micro_batch accumulation tokens_per_micro_batch components phases basis budget"
        " remedies length generate_adds_bytes",
    ),
    "phase": _event_kind("name", "detail done total"),
    "heartbeat": _event_kind("", "phase"),
    "step": _event_kind(
        "step epoch loss learning_rate grad_norm tokens target_tokens tokens_per_second step_seconds data_wait_seconds"
        " mfu micro_batches allocated_bytes reserved_bytes peak_bytes",
        "aux_loss expert_utilisation samples skipped loss_scale largest_micro_batch budget ranks",
    ),
    "backoff": _event_kind(
        "step phase failed_rank cause requested_bytes allocated_bytes reserved_bytes remedy before after attempt",
        "capacity_bytes sequences_before sequences_after samples_lost report text",
    ),
    "remedy_lifted": _event_kind("step remedy", "before after reason"),
    "eval": _event_kind("step metrics", "samples seconds count"),
    "checkpoint_saved": _event_kind("step path save_seconds size_bytes", "best reason metrics"),
    "oom_report": _event_kind("path", "step"),
    "gpu": _event_kind("index used_bytes utilisation_percent temperature_celsius power_watts", "name total_bytes"),
    "control": _event_kind("request accepted reason", "step"),
    "paused": _event_kind("", "step path reason"),
    "resumed": _event_kind("step from", "path schedule"),
    "warning": _event_kind("code text fix", "step"),
    "proof": _event_kind("name passed detail fallback seconds", "cached"),
    "run_finished": _event_kind(
        "status exit_code result", "error reason steps seconds samples_lost measured best_step best_metric"
    ),
}


def check_fields(kind: str, fields: frozenset[str]) -> None:
    """Raise ValueError if an event lacks a field that its kind requires, or has one that its kind does not know;
    both are bugs of the code that writes it."""
    if kind not in EVENT_KINDS:
        raise ValueError(f"no such event kind: {kind!r}; add it to engine/journal/event_schema.py")
    missing = EVENT_KINDS[kind].required - fields
    unknown = fields - EVENT_KINDS[kind].required - EVENT_KINDS[kind].optional
    if missing or unknown:
        raise ValueError(f"event {kind!r}: missing {sorted(missing)}, unknown {sorted(unknown)}")
