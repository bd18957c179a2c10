"""The event file `events.jsonl`: one writer, any number of readers, one JSON object per line; and the table of event
kinds.

A line is complete when it ends in a newline, and is then strict JSON in ASCII; a loss that is not finite is `null`. A
writer removes a torn tail: completed with a newline, it would be a line on which `jq` and pandas fail.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from engine.journal.directory import RunDirectory
from engine.journal.files import decode_json, open_regular

COMMON = frozenset({"seq", "time", "kind", "stage", "rank", "stage_seq"})
"""Fields that only the writer sets: all but `stage_seq` in every event. In a staged run's journal, `stage` names the
stage that an event comes from, and `stage_seq` is the event's `seq` in that stage's own journal."""

FINAL_STATUSES = ("paused", "done", "stopped", "failed", "oom")
"""Recorded in `run_finished`; queued, running and stale are recorded nowhere (`engine.journal.summary`)."""


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


VALUE_TYPES: dict[str, Callable[[Any], bool]] = {
    "whole": _is_whole,
    "number": _is_number,
    "text": _is_text,
    "flag": lambda value: isinstance(value, bool),
    "table": lambda value: isinstance(value, dict),
    "texts": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "prediction": is_prediction,
    "measured": _is_measured,
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
        " target_tokens:whole dropped reasons loss:text attention:text dtype:text number:whole of:whole from:texts"
        " path:text from_start:flag device_used_bytes device_processes stage_kind:text",
    ),
    "stage_finished": _event_kind(
        "name:text status:text exit_code:whole",
        "number:whole steps:whole seconds:number peak_bytes:number device_used_bytes result reason:text",
    ),
    "plan": _event_kind(
        "predicted:prediction verdict:text",
        "capacity_bytes:number deciding_phase:text micro_batch accumulation tokens_per_micro_batch components:table"
        " phases basis budget remedies:table length generate_adds_bytes:number layers recomputed_layers",
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
        "aux_loss:number expert_utilisation samples skipped loss_scale:number largest_micro_batch budget ranks"
        " rewards_chosen:number rewards_rejected:number rewards_margin:number rewards_accuracy:number"
        " logps_chosen:number logps_rejected:number",
    ),
    "backoff": _event_kind(
        "step:whole phase:text failed_rank:whole? cause requested_bytes:number? allocated_bytes:number?"
        " reserved_bytes:number? remedy:text before after attempt:whole",
        "capacity_bytes:number sequences_before sequences_after samples_lost:whole report text",
    ),
    "remedy_lifted": _event_kind("step:whole remedy:text", "before after reason:text"),
    "eval": _event_kind("step:whole metrics:table", "samples seconds:number count:whole"),
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
        raise ValueError(f"no such event kind: {kind!r}; add it to engine/journal/events.py")
    missing = EVENT_KINDS[kind].required.keys() - fields
    unknown = fields - EVENT_KINDS[kind].required.keys() - EVENT_KINDS[kind].optional.keys()
    if missing or unknown:
        raise ValueError(f"event {kind!r}: missing {sorted(missing)}, unknown {sorted(unknown)}")


Event = dict[str, Any]

READ_BYTES = 1 << 20
"""Size of one read: few calls for a large file, and little memory."""

MOST_LINE_BYTES = 16 << 20
"""Size of the largest event that is read."""


class EventWriter:
    """Appends events to a run's `events.jsonl`. Thread-safe; only rank 0 of the engine that holds the claim has one."""

    def __init__(self, directory: RunDirectory, *, stage: str = "", rank: int = 0) -> None:
        """Remove a torn tail and continue `seq`. `stage` and `rank` are written into every event. Raises OSError."""
        self.stage = stage
        self._rank = rank
        self._lock = threading.Lock()
        self._file = os.open(directory.events, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._seq = _cut_torn_tail(self._file)
        self._last_write = time.monotonic()

    @property
    def last_seq(self) -> int:
        """0 if the file has no event."""
        return self._seq

    def write(self, kind: str, **fields: Any) -> Event:
        """Append one event. Raises ValueError if the fields do not match the kind, OSError on a full disk; the file is
        then as before, so the event can be written again later."""
        check_fields(kind, frozenset(fields))
        with self._lock:
            return self._append(kind, fields)

    def copy(self, event: Event, stage: str) -> Event:
        """Append an event from the journal of `stage`, with its time and fields as they are; its `seq` there becomes
        `stage_seq`. Raises OSError as `write` does."""
        fields = {key: value for key, value in event.items() if key not in ("seq", "kind", "stage")}
        with self._lock:
            return self._append(event["kind"], {**fields, "stage": stage, "stage_seq": event["seq"]})

    def write_if_quiet(self, quiet_seconds: float, kind: str, **fields: Any) -> Event | None:
        """`write`, but only if nothing was written for `quiet_seconds`; else None."""
        check_fields(kind, frozenset(fields))
        with self._lock:
            if time.monotonic() - self._last_write < quiet_seconds:
                return None
            return self._append(kind, fields)

    def close(self) -> None:
        """Writing afterwards raises OSError."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _append(self, kind: str, fields: Event) -> Event:
        event = {
            "seq": self._seq + 1,
            "time": utc_now(),
            "kind": kind,
            "stage": self.stage,
            "rank": self._rank,
            **fields,
        }
        line = encode_event(event)
        end = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # A part of the line may have reached the disk; the next line must not be appended to it.
            if self._file >= 0:
                os.ftruncate(self._file, end)
            raise
        self._seq += 1
        self._last_write = time.monotonic()
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def utc_now() -> str:
    """ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode_event(event: Event) -> bytes:
    """One line of the file, newline included. Raises TypeError for a value that JSON cannot represent."""
    try:
        text = json.dumps(event, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(event), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def decode_event(line: bytes) -> Event | None:
    """The only reader of event lines. None for a damaged line (a power failure can leave zeros), and for an event
    without a field that its kind must have, or with a value of another type; unknown kinds and fields may come from a
    newer version, and pass."""
    try:
        event = decode_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and _is_event(event) else None


def _is_event(event: Event) -> bool:
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


def _finite(value: Any) -> Any:
    """A copy in which every NaN and infinity, also in nested tables and lists, is None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def _cut_torn_tail(file: int) -> int:
    """Remove the bytes after the last newline; returns the `seq` of the last readable line, 0 when there is none."""
    size = os.fstat(file).st_size
    kept = b""
    start = size
    while start > 0:
        step = min(READ_BYTES, start)
        start -= step
        kept = os.pread(file, step, start) + kept
        if size == start + len(kept) and b"\n" in kept:
            size = start + kept.rindex(b"\n") + 1
            kept = kept[: size - start]
        for line in reversed(kept.split(b"\n")[0 if start == 0 else 1 :]):
            event = decode_event(line)
            if event is not None:
                os.ftruncate(file, size)
                return int(event["seq"])
    os.ftruncate(file, size if kept.endswith(b"\n") else 0)
    return 0


class EventTail:
    """Reads the lines added to an event file since the last call. The file is closed between calls."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        """Where the next complete line begins."""
        self.damaged = 0
        """Complete lines so far that were not events."""

    def poll(self) -> list[Event]:
        """An incomplete last line is returned by a later call."""
        events = []
        for line in self.lines():
            event = decode_event(line)
            if event is None:
                self.damaged += 1
            else:
                events.append(event)
        return events

    def lines(self) -> Iterator[bytes]:
        """The complete lines since the last call, newline included; advances the offset past them. Of a line above
        MOST_LINE_BYTES, which no engine writes, pieces come, and none of them is an event. Raises OSError if the file
        cannot be read."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.offset:
                self.offset = 0  # the file was replaced by a shorter one
            file.seek(self.offset)
            while line := file.readline(MOST_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < MOST_LINE_BYTES:
                    return
                self.offset += len(line)
                yield line


def end_of_events(path: Path) -> int:
    """The byte just after the last complete line: an EventTail from there returns new events only."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return 0
    with file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - READ_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
