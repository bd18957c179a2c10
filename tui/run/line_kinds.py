"""The kinds of lines that events and log can be narrowed to with a key.

Try: `python -c "from tui.run.line_kinds import EVENT_KINDS; print(list(EVENT_KINDS))"`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from tui.run.log_tail import LogLine
from tui.run.watch import FeedLine

T = TypeVar("T")

BAD_ENDS = ("failed", "oom")
"""The states of an end that is a problem, with which its text begins."""


def _is_problem(line: FeedLine) -> bool:
    if line.kind == "run_finished":
        return line.text.startswith(BAD_ENDS)
    return line.kind in ("backoff", "oom_report", "warning", "remedy_lifted")


EVENT_KINDS: Mapping[str, Callable[[FeedLine], bool] | None] = {
    "": None,
    "problems": _is_problem,
    "evaluations": lambda line: line.kind == "eval",
    "checkpoints": lambda line: line.kind in ("checkpoint_saved", "resumed", "paused"),
    "starts and requests": lambda line: line.kind in ("run_started", "control", "paused", "resumed", "run_finished"),
}
"""What the events can be narrowed to, in the order of the key; first all events."""

LOG_LEVELS: Mapping[str, Callable[[LogLine], bool] | None] = {
    "": None,
    "warnings and errors": lambda line: line.level != "info",
    "errors": lambda line: line.level == "error",
}
"""What the log can be narrowed to, in the order of the key; first all lines."""


def next_kind(kinds: Mapping[str, T], present: str) -> tuple[str, T]:
    """The kind after the present one, with its function; after the last comes the first."""
    names = list(kinds)
    name = names[(names.index(present) + 1) % len(names)]
    return name, kinds[name]
