"""Out of memory: every time it happened in a run, what was done about it, and the engine's reports of what held it.

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
from tui.screens.text_screen import ReadingScreen

MOST_REPORTS = 20
"""Reports that are shown, the newest."""

BACKOFF_MARK = b'"kind":"backoff"'
"""How the writer spells it. Only these lines are parsed: there may be a million others."""


class OomScreen(ReadingScreen):
    """What ran out, and where it went."""

    where = "oom"
    BINDINGS = bindings("oom")

    def receive(self, argument: object) -> None:
        """The run directory."""
        assert isinstance(argument, RunDirectory)
        self._directory = argument
        self._told = [*self._sentences(), *self._reports()]

    def about(self) -> str:
        """The run's name."""
        return clean(self._directory.name)

    def lines(self, width: int) -> Sequence[Content]:
        """First the sentences, then the reports, newest first."""
        return [Content.assemble(" ", line) for content in self._told for line in content.wrap(max(10, width - 2))]

    def _sentences(self) -> Iterable[Content]:
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
            yield Content.styled("the engine has left no report of its own in oom/", "$muted")
        for path in paths[:MOST_REPORTS]:
            yield Content.styled(clean(path.name), "bold $info")
            yield from _report(path, "#" if self.console.ascii_only else "█")
            yield Content("")
        if len(paths) > MOST_REPORTS:
            yield Content.styled(f"{len(paths) - MOST_REPORTS} older reports are in {clean(paths[0].parent)}", "$muted")


def _report(path: Path, bar: str) -> list[Content]:
    """A report as a page."""
    report = read_report(path)
    if report is None:
        return [Content.styled("cannot be read: it may have been cut off", "$caution")]
    try:
        return [Content(line) for line in report_lines(report, bar=bar)]
    except (KeyError, TypeError, ValueError, AttributeError):
        return [Content.styled("is no report as this version writes them", "$caution")]
