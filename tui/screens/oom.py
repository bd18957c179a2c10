"""Out of memory: what would have avoided it, every time a run ran out of memory with the remedy taken, and the engine's
reports of what used the memory.

Try: `o` on a run that has backed off; headless: `tunedeck show RUN --oom`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from textual.content import Content

from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean, describe_event
from engine.journal.events import EventTail, decode_event
from engine.journal.oom_text import read_report, report_lines, report_or_problem, way_text
from engine.journal.summary import KIND_WITHIN_BYTES
from tui.keys import bindings
from tui.launch.fields import format_value
from tui.run.reuse import launch_settings
from tui.screens.text_screen import TextScreen
from tui.widgets.row_list import RowList

MAX_REPORTS = 20
"""The number of newest reports that are shown."""

BACKOFF_MARK = b'"kind":"backoff"'
"""Part of the journal line of a backoff. Only lines that contain it are parsed: there may be a million others."""


class OomScreen(TextScreen):
    """The screen that shows the backoffs of a run and its out-of-memory reports."""

    screen_name = "oom"
    BINDINGS = bindings("oom")

    def set_argument(self, argument: object) -> None:
        """Take the run directory, and read its backoffs and reports."""
        assert isinstance(argument, RunDirectory)
        self._directory = argument
        paths = sorted(argument.oom.glob("*.json"), reverse=True)
        newest = read_report(paths[0]) if paths else None
        self._ways = _ways(newest)
        self._capacity = newest.get("capacity_bytes") if newest is not None else None
        self._contents = [*self._backoffs(), *self._reports(paths)]
        self._way_lines: list[int] = []
        """For each line on the screen before the backoffs, the index in `_ways` of the way it is about; -1 for the
        heading."""

    def title_detail(self) -> str:
        """The run's name, for the title bar."""
        return clean(self._directory.name)

    def text_lines(self, width: int) -> Sequence[Content]:
        """First what would have avoided the newest failure, then a sentence for each backoff, then the reports, newest
        first."""
        room = max(10, width - 2)
        heading = Content.styled(
            "changes that each would have avoided the latest error; a opens Launch with the selected one",
            "bold $good",
        )
        found = [(-1, line) for line in heading.wrap(room)] if self._ways else []
        for number, way in enumerate(self._ways):
            found += [
                (number, line) for line in Content(f"{number + 1}  {clean(way_text(way, self._capacity))}").wrap(room)
            ]
        self._way_lines = [number for number, _ in found]
        rest = [Content(""), *self._contents] if found else self._contents
        lines = [line for _, line in found] + [line for content in rest for line in content.wrap(room)]
        return [Content.assemble(" ", line) for line in lines]

    def disabled_reason(self, action: str) -> str | None:
        """Why the key has no effect; None if it has one."""
        return "no report has a change that would have avoided it" if action == "apply" and not self._ways else None

    def do_apply(self) -> None:
        """Open Launch with the settings of this run and the changes under the cursor, else those named first."""
        cursor = self.query_one(RowList).cursor
        number = self._way_lines[cursor] if cursor < len(self._way_lines) else -1
        settings = launch_settings(self._directory)
        changes = self._ways[max(0, number)]["changes"]
        settings["overrides"] += [f"{key}={format_value(value)}" for key, value in changes.items()]
        self.console.open_screen("launch", settings)

    def _backoffs(self) -> Iterable[Content]:
        try:
            for line in EventTail(self._directory.events).lines():
                event = decode_event(line) if line.find(BACKOFF_MARK, 0, KIND_WITHIN_BYTES) >= 0 else None
                if event is not None:
                    yield Content(describe_event(event) or "")
        except OSError as error:
            yield Content.styled(f"the events cannot be read: {error.strerror or error}", "$bad")

    def _reports(self, paths: Sequence[Path]) -> Iterable[Content]:
        yield Content("")
        if not paths:
            yield Content.styled("the engine has not written a report to oom/", "$muted")
        for path in paths[:MAX_REPORTS]:
            yield Content.styled(clean(path.name), "bold $info")
            # They stand above all reports, where `a` applies them; an attempt before failed for the same reason.
            told = bool(self._ways) and (path == paths[0] or _ways(read_report(path)) == self._ways)
            yield from _report(path, "#" if self.console.ascii_only else "█", with_fixes=not told)
            yield Content("")
        if len(paths) > MAX_REPORTS:
            yield Content.styled(f"{len(paths) - MAX_REPORTS} older reports are in {clean(paths[0].parent)}", "$muted")


def _ways(report: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the changes that would have avoided a failure, as its report has them; none if it has none, or is not in
    the format of this version's reports."""
    ways = report.get("avoided_by") if report is not None else None
    needed = {"changes", "peak_bytes", "changes_learning"}
    return [way for way in ways if isinstance(way, dict) and needed <= way.keys()] if isinstance(ways, list) else []


def _report(path: Path, bar: str, *, with_fixes: bool) -> list[Content]:
    """Return the lines of the out-of-memory report in the file `path`; a single line that says so if it cannot be read.
    `bar` is the character of which bars are drawn."""
    report = report_or_problem(path)
    if isinstance(report, str):
        return [Content.styled(report, "$caution")]
    return [Content(line) for line in report_lines(report, bar=bar, with_fixes=with_fixes)]
