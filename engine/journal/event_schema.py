"""The kinds of events in a run's journal: the fields of each, and the types of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

COMMON = frozenset({"seq", "time", "kind", "stage", "rank", "stage_seq"})
"""Fields that only the writer sets: all but `stage_seq` in every event. In a staged run's journal, `stage` names the
stage that an event comes from, and `stage_seq` is the event's `seq` in that stage's own journal."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_prediction(value: Any) -> bool:
    """Whether `value` is a predicted peak in bytes, or a table of predicted figures (`plan.json`, an event `plan`)."""
    if not isinstance(value, dict):
        return value is None or _is_number(value)
    figures = (value.get(key) for key in ("peak_bytes", "capacity_bytes"))
    parts = value.get("components")
    return (
        all(figure is None or _is_number(figure) for figure in figures)
        and all(isinstance(value.get(key, ""), str | None) for key in ("verdict", "deciding_phase"))
        and (parts is None or (isinstance(parts, dict) and all(map(_is_number, parts.values()))))
    )


def _is_measured(value: Any) -> bool:
    used = value.get("predicted") if isinstance(value, dict) else None
    sized = not used or all(_is_whole(value.get(key)) for key in ("sequences", "length"))
    return (
        isinstance(value, dict) and sized and all(map(is_prediction, (value, used))) and isinstance(used, dict | None)
    )


def _is_utilisation(value: Any) -> bool:
    mean = value.get("mean") if isinstance(value, dict) else None
    return isinstance(mean, list) and all(map(_is_number, [*mean, value.get("entropy")]))


VALUE_TYPES: dict[str, Callable[[Any], bool]] = {
    "whole": _is_whole,
    "number": _is_number,
    "text": _is_text,
    "flag": lambda value: isinstance(value, bool),
    "table": lambda value: isinstance(value, dict),
    "texts": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "tables": lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value),
    "prediction": is_prediction,
    "measured": _is_measured,
    "utilisation": _is_utilisation,
    "any": lambda value: True,
}


class EventKind(NamedTuple):
    """The fields that events of one kind must have, those that they may have, and the type of each: a key of
    VALUE_TYPES, with "?" if it may be null. Optional fields always may."""

    required: dict[str, str]
    optional: dict[str, str]


def _event_kind(required: str = "", optional: str = "") -> EventKind:
    return EventKind(*(dict(_typed(word) for word in fields.split()) for fields in (required, optional)))


def _typed(word: str) -> tuple[str, str]:
    name, _, kind = word.partition(":")
    return name, kind or "any"


EVENT_KINDS: dict[str, EventKind] = {
    "run_started": _event_kind(
        "run:text pid:whole world_size:whole versions:table",
        "host:text device:text device_name:text simulated:flag capacity_bytes:number allocator resumed:flag seed"
        " parameters trainable",
    ),
    "stage_started": _event_kind(
        "",
        "name:text max_steps:whole epochs:number batch_size:whole samples:whole validation_samples:whole tokens:whole"
        " target_tokens:whole sources validation_sources"
        " dropped reasons loss:text attention:text dtype:text number:whole of:whole from:texts"
        " path:text from_start:flag device_used_bytes device_processes stage_kind:text",
    ),
    "stage_finished": _event_kind(
        "name:text status:text exit_code:whole",
        "number:whole steps:whole seconds:number peak_bytes:number device_used_bytes result reason:text",
    ),
    "plan": _event_kind(
        "predicted:prediction verdict:text",
        "capacity_bytes:number deciding_phase:text micro_batch accumulation tokens_per_micro_batch components:table"
        " phases basis budget remedies:table length target_tokens generate_adds_bytes:number layers recomputed_layers",
    ),
    "micro_batch": _event_kind(
        "step:whole sequences:whole length:whole reason:text", "before:whole predicted:prediction"
    ),
    "phase": _event_kind("name:text", "detail:text done:whole total:whole"),
    "heartbeat": _event_kind("", "phase:text"),
    "step": _event_kind(
        "step:whole epoch:number? loss:number? learning_rate:number? grad_norm:number? tokens:number"
        " target_tokens:number tokens_per_second:number? step_seconds:number data_wait_seconds:number? mfu:number?"
        " micro_batches:number allocated_bytes:number? reserved_bytes:number? peak_bytes:number?",
        "aux_loss:number expert_utilisation:utilisation samples skipped loss_scale:number largest_micro_batch budget"
        " ranks"
        " rewards_chosen:number rewards_rejected:number rewards_margin:number rewards_accuracy:number"
        " logps_chosen:number logps_rejected:number kl:number",
    ),
    "backoff": _event_kind(
        "step:whole phase:text failed_rank:whole? cause requested_bytes:number? allocated_bytes:number?"
        " reserved_bytes:number? remedy:text before after attempt:whole",
        "capacity_bytes:number sequences_before sequences_after samples_lost:whole report text",
    ),
    "remedy_lifted": _event_kind("step:whole remedy:text", "before after reason:text"),
    "eval": _event_kind("step:whole metrics:table", "samples:tables seconds:number count:whole"),
    "checkpoint_saved": _event_kind(
        "step:whole path:text save_seconds:number size_bytes:number", "best reason:text metrics:table"
    ),
    "oom_report": _event_kind("path:text", "step:whole"),
    "gpu": _event_kind(
        "index:whole used_bytes:number? utilisation_percent:number? temperature_celsius:number? power_watts:number?",
        "name:text total_bytes:number",
    ),
    "control": _event_kind("request:text accepted:flag reason:text", "step:whole"),
    "paused": _event_kind("", "step:whole path:text reason:text"),
    "resumed": _event_kind("step:whole from:text", "path:text schedule:text"),
    "warning": _event_kind("code:text text:text fix:text", "step:whole"),
    "proof": _event_kind("name:text passed:flag? detail:text fallback:text seconds:number?", "cached"),
    "weights": _event_kind("source:text path:text files:texts tensors:whole loaded:whole unread:table", "opened:text"),
    "chat_started": _event_kind("pid:whole models:texts"),
    "chat_ready": _event_kind(
        "models:texts settings:table", "base:text plain:texts images:flag system:text device:text seconds:number"
    ),
    "chat_note": _event_kind("text:text"),
    "chat_refused": _event_kind("text:text"),
    "chat_question": _event_kind("text:text", "images:texts again:flag"),
    "chat_prompt": _event_kind("model:text text:text", "tokens:whole"),
    "chat_tokens": _event_kind("model:text text:text", "pieces"),
    "chat_answer": _event_kind("model:text text:text stopped_by:text seconds:number count:whole"),
    "chat_answered": _event_kind(),
    "chat_undone": _event_kind(),
    "chat_settings": _event_kind("settings:table", "system:text"),
    "run_finished": _event_kind(
        "status:text exit_code:whole result",
        "error:text reason:text seconds:number samples_lost:whole measured:measured best_step best_metric",
    ),
}


def check_fields(kind: str, fields: frozenset[str]) -> None:
    """Raise ValueError for a missing or unknown field: bugs of the code that writes the event."""
    if kind not in EVENT_KINDS:
        raise ValueError(f"no such event kind: {kind!r}; add it to engine/journal/event_schema.py")
    missing = EVENT_KINDS[kind].required.keys() - fields
    unknown = fields - EVENT_KINDS[kind].required.keys() - EVENT_KINDS[kind].optional.keys()
    if missing or unknown:
        raise ValueError(f"event {kind!r}: missing {sorted(missing)}, unknown {sorted(unknown)}")


def is_event(event: dict[str, Any]) -> bool:
    """Whether a table has what an event of its kind must have, with values of their types. Unknown kinds and fields may
    come from a newer version, and pass."""
    kind = event.get("kind")
    if not (
        isinstance(kind, str)
        and _is_whole(event.get("seq"))
        and _is_whole(event.get("stage_seq", 0))
        and isinstance(event.get("time", ""), str)
        and isinstance(event.get("stage", ""), str)
    ):
        return False
    known = _CHECKS.get(kind)
    if known is None:
        return True
    required, optional = known
    for name, holds in required:
        if name not in event or not holds(event[name]):
            return False
    return all(event.get(name) is None or holds(event[name]) for name, holds in optional)


_Checks = list[tuple[str, Callable[[Any], bool]]]


def _checks(types: dict[str, str]) -> _Checks:
    return [(name, _or_null(kind[:-1]) if kind.endswith("?") else VALUE_TYPES[kind]) for name, kind in types.items()]


def _or_null(kind: str) -> Callable[[Any], bool]:
    return lambda value: value is None or VALUE_TYPES[kind](value)


_CHECKS: dict[str, tuple[_Checks, _Checks]] = {
    name: (_checks(kind.required), _checks(kind.optional)) for name, kind in EVENT_KINDS.items()
}
