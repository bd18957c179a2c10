"""Reports of out-of-memory errors as text for people. Pure functions; no printing, no colour, no state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config.files.text import visible
from engine.journal.event_text import (
    PHASE_NAMES,
    REMEDY_TEXTS,
    RETRIED_PARTS,
    ends_text,
    format_bytes,
    format_share,
    layers_text,
    speed_text,
)
from engine.journal.files import read_table

BAR_CHARACTERS = 30


INCOMPLETE, OTHER_FORMAT = "cannot be read: it may be incomplete", "not in the format of this version's reports"
"""Why a report is not shown."""


def read_report(path: Path) -> dict[str, Any] | None:
    """None if the file does not exist or is damaged, also by values that cannot be shown."""
    found = report_or_problem(path)
    return None if isinstance(found, str) else found


def report_or_problem(path: Path) -> dict[str, Any] | str:
    """The report, or INCOMPLETE or OTHER_FORMAT."""
    try:
        found = read_table(path)
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return INCOMPLETE
    try:
        report_lines(found)
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError):
        return OTHER_FORMAT
    return found


def report_lines(report: dict[str, Any], *, bar: str = "█", with_fixes: bool = True) -> list[str]:
    """Without line breaks. `bar` is the character that bars of memory are drawn with."""
    return [visible(line) for line in _lines(report, bar, with_fixes)]


def _lines(report: dict[str, Any], bar: str, with_fixes: bool) -> Iterator[str]:
    name = str(report.get("device"))
    simulated = " (simulated)" if report.get("simulated") and "simulated" not in name else ""
    place = PHASE_NAMES.get(str(report.get("phase")), str(report.get("phase")))
    yield f"step {report.get('step')}, attempt {report.get('attempt')}: out of memory in {place}"
    yield f"{name}{simulated}: {report.get('text')}"
    yield from _remedy(report)
    if with_fixes or not report.get("avoided_by"):
        yield from _suggestions(report)
    yield ""
    yield from _figures(report)
    yield from _held(report, bar)
    yield from _largest(report)
    yield from _processes(report)
    if report.get("snapshot"):
        yield ""
        yield f"the allocator's snapshot is {report['snapshot']}; open it at pytorch.org/memory_viz"


def _figures(report: dict[str, Any]) -> Iterator[str]:
    rows = [
        ("wanted", report.get("requested_bytes")),
        ("allocated", report.get("allocated_bytes")),
        ("reserved", report.get("reserved_bytes")),
        ("capacity", report.get("capacity_bytes")),
    ]
    for name, value in rows:
        if value is not None:
            yield f"{name:12} {_figure(value)}"
    elsewhere = int(report.get("capacity_bytes") or 0) - int(report.get("available_bytes") or 0)
    if report.get("available_bytes") is not None and elsewhere > 0:
        yield f"{'elsewhere':12} {format_bytes(elsewhere)} held by other processes on the device"
    flight = report.get("micro_batch")
    if flight:
        yield f"{'in flight':12} {flight['sequences']} sequences of at most {flight['length']} tokens"


def _figure(count: float) -> str:
    """With the digits that show that what was wanted exceeds what was left."""
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"


def _held(report: dict[str, Any], bar: str) -> Iterator[str]:
    held = {name: int(value) for name, value in (report.get("held") or {}).items() if value}
    if not held:
        return
    yield ""
    yield "memory by component"
    most = max(held.values())
    for name, value in sorted(held.items(), key=lambda item: -item[1]):
        yield f"  {name:12} {format_bytes(value):>10}  {bar * max(1, round(BAR_CHARACTERS * value / most))}"


def _largest(report: dict[str, Any]) -> Iterator[str]:
    largest = report.get("largest") or []
    if not largest:
        return
    yield ""
    yield "largest live tensors"
    for tensor in largest:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        size, name = format_bytes(tensor["size_bytes"]), tensor["name"] or tensor["operation"]
        yield f"  {size:>10}  {shape} {tensor['dtype']}  {name}"


def _processes(report: dict[str, Any]) -> Iterator[str]:
    processes = report.get("processes") or []
    if not processes:
        return
    yield ""
    yield "processes on the device"
    for process in processes:
        used = format_bytes(process["used_bytes"]) if process.get("used_bytes") is not None else "?"
        yield f"  gpu {process['gpu']}  {process['pid']:>8}  {used:>10}  {process['name']}"


def _remedy(report: dict[str, Any]) -> Iterator[str]:
    remedy = str(report.get("remedy"))
    done = REMEDY_TEXTS.get(remedy, remedy).format(
        what=RETRIED_PARTS.get(str(report.get("phase")), "the step"),
        size="in smaller pieces",
        layers=layers_text(report),
        ends=ends_text(report),
    )
    before, after = (_setting(remedy, report.get(key)) for key in ("before", "after"))
    budget = "micro-batches of up to " if remedy == "cut" else ""
    yield f"remedy: {done}" + (f" ({budget}{before} -> {after})" if report.get("before") is not None else "")


def _setting(remedy: str, value: Any) -> str:
    """For "cut" the micro-batch budget in bytes, else the value of a recipe key."""
    return format_bytes(value) if remedy == "cut" and isinstance(value, int) and value > 2**16 else json.dumps(value)


def way_text(way: dict[str, Any], capacity: int | None) -> str:
    """A way is an item of `avoided_by`: a change that would have avoided the failure. `capacity`: the device's bytes.
    Reports of earlier versions lack the change of speed."""
    changes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in way["changes"].items())
    learning = "; changes the training result" if way["changes_learning"] else ""
    peak = format_share(way["peak_bytes"], capacity) if capacity else format_bytes(way["peak_bytes"])
    speed = f", {speed_text(way['slower_percent'])}" if "slower_percent" in way else ""
    arithmetic = ", changes arithmetic" if way.get("changes_arithmetic") else ""
    tight = ", tight" if way.get("tight") else ""
    return f"{changes}: a peak of {peak}{tight}{speed}{arithmetic}{learning}"


def _suggestions(report: dict[str, Any]) -> Iterator[str]:
    ways, plan = report.get("avoided_by") or [], report.get("plan") or {}
    yield ""
    if ways:
        yield "changes that would have avoided it"
        yield from (f"  {way_text(way, report.get('capacity_bytes'))}" for way in ways)
    elif plan:
        yield (
            f"the plan predicts a peak of {format_bytes(plan['peak_bytes'])}, which fits: other processes held "
            "memory, memory was fragmented, or the plan is wrong for this model"
        )
