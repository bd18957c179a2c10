"""Out of memory: every time a run ran out of memory, the remedy taken, and the engine's reports of what used it.

Try: `o` on a run that has backed off; headless: `tunedeck show RUN --oom`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from textual.content import Content

from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean, describe_event
from engine.journal.events import EventTail, decode_event
from engine.journal.oom_page import read_report, report_lines
from engine.journal.summary import KIND_WITHIN_BYTES
from tui.keys import bindings
from tui.screens.text_screen import TextScreen

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
        self._contents = [*self._backoffs(), *self._reports()]

    def title_detail(self) -> str:
        """The run's name, for the title bar."""
        return clean(self._directory.name)

    def text_lines(self, width: int) -> Sequence[Content]:
        """First a sentence for each backoff, then the reports, newest first."""
        return [Content.assemble(" ", line) for content in self._contents for line in content.wrap(max(10, width - 2))]

    def _backoffs(self) -> Iterable[Content]:
        try:
            for line in EventTail(self._directory.events).lines():
                event = decode_event(line) if line.find(BACKOFF_MARK, 0, KIND_WITHIN_BYTES) >= 0 else None
                if event is not None:
                    yield Content(describe_event(event) or "")
        except OSError as error:
            yield Content.styled(f"the events cannot be read: {error.strerror or error}", "$bad")

    def _reports(self) -> Iterable[Content]:
        paths = sorted(self._directory.oom.glob("*.json"), reverse=True)
        yield Content("")
        if not paths:
            yield Content.styled("the engine has written no report into oom/", "$muted")
        for path in paths[:MAX_REPORTS]:
            yield Content.styled(clean(path.name), "bold $info")
            yield from _report(path, "#" if self.console.ascii_only else "█")
            yield Content("")
        if len(paths) > MAX_REPORTS:
            yield Content.styled(f"{len(paths) - MAX_REPORTS} older reports are in {clean(paths[0].parent)}", "$muted")


def _report(path: Path, bar: str) -> list[Content]:
    """Return the lines of the out-of-memory report in the file `path`; a single line that says so if it cannot be read.
    `bar` is the character of which bars are drawn."""
    report = read_report(path)
    if report is None:
        return [Content.styled("cannot be read: it may be incomplete", "$caution")]
    try:
        return [Content(line) for line in report_lines(report, bar=bar)]
    except (KeyError, TypeError, ValueError, AttributeError):
        return [Content.styled("not in the format of this version's reports", "$caution")]
