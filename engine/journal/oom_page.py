"""Formats an out-of-memory report as a page of text. Pure: takes a report as written to `oom/`, returns lines.

The command line prints the page and the console shows it. Text in a report comes from errors and models, so control
characters in it are made visible.

Try: `tunedeck show last --oom`
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.journal.event_text import PHASE_NAMES, REMEDY_TEXTS, format_bytes
from engine.spec.files.text import visible

BAR_CHARACTERS = 30
"""Characters of the longest bar."""


def read_report(path: Path) -> dict[str, Any] | None:
    """Read the report in a file; returns None if the file does not exist or is damaged."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def report_lines(report: dict[str, Any], *, bar: str = "█") -> list[str]:
    """The lines of the report's page, without line breaks. `bar`: the character that bars of memory are drawn with."""
    return [visible(line) for line in _lines(report, bar)]


def _lines(report: dict[str, Any], bar: str) -> Iterator[str]:
    name = str(report.get("device"))
    simulated = " (simulated)" if report.get("simulated") and "simulated" not in name else ""
    place = PHASE_NAMES.get(str(report.get("phase")), str(report.get("phase")))
    yield f"step {report.get('step')}, attempt {report.get('attempt')}: out of memory in {place}"
    yield f"{name}{simulated}: {report.get('text')}"
    yield from _remedy(report)
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
            yield f"{name:12} {format_bytes(value)}"
    elsewhere = int(report.get("capacity_bytes") or 0) - int(report.get("available_bytes") or 0)
    if report.get("available_bytes") is not None and elsewhere > 0:
        yield f"{'elsewhere':12} {format_bytes(elsewhere)} held by other processes on the device"
    flight = report.get("micro_batch")
    if flight:
        yield f"{'in flight':12} {flight['sequences']} sequences of at most {flight['length']} tokens"


def _held(report: dict[str, Any], bar: str) -> Iterator[str]:
    held = {name: int(value) for name, value in (report.get("held") or {}).items() if value}
    if not held:
        return
    yield ""
    yield "what held the memory"
    most = max(held.values())
    for name, value in sorted(held.items(), key=lambda item: -item[1]):
        yield f"  {name:12} {format_bytes(value):>10}  {bar * max(1, round(BAR_CHARACTERS * value / most))}"


def _largest(report: dict[str, Any]) -> Iterator[str]:
    largest = report.get("largest") or []
    if not largest:
        return
    yield ""
    yield "the largest live tensors"
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
    done = REMEDY_TEXTS.get(remedy, remedy).format(what="the step", size="in smaller pieces")
    before, after = (_setting(remedy, report.get(key)) for key in ("before", "after"))
    yield f"what was done: {done}" + (f" ({before} -> {after})" if report.get("before") is not None else "")


def _setting(remedy: str, value: Any) -> str:
    """Format the value that a remedy set: for "cut" the micro-batch budget in bytes, else the value of a recipe key."""
    return format_bytes(value) if remedy == "cut" and isinstance(value, int) and value > 2**16 else json.dumps(value)


def way_text(way: dict[str, Any]) -> str:
    """Format one of a report's changes that would have avoided the failure (an item of `avoided_by`)."""
    changes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in way["changes"].items())
    learning = "; changes what is learned" if way["changes_learning"] else ""
    return f"{changes}: a peak of {format_bytes(way['peak_bytes'])}{learning}"


def _suggestions(report: dict[str, Any]) -> Iterator[str]:
    ways, plan = report.get("avoided_by") or [], report.get("plan") or {}
    yield ""
    if ways:
        yield "what would have avoided it"
        yield from (f"  {way_text(way)}" for way in ways)
    elif plan:
        yield (
            f"the plan predicts a peak of {format_bytes(plan['peak_bytes'])} here, which fits: other processes held "
            "memory, memory was fragmented, or the plan is wrong for this model"
        )
