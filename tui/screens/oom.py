"""Out of memory: every time it happened in a run, what was done about it, and the engine's reports of what held it.

Try: `o` on a run that has backed off; headless: `tunedeck show RUN --oom`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from textual.content import Content

from engine.journal.directory import RunDirectory
from engine.journal.events import read_events
from engine.journal.sentences import clean, sentence, size
from tui.keys import bindings
from tui.screens.reading import ReadingScreen

MOST_REPORTS = 20
"""Reports that are shown, the newest."""


class OomScreen(ReadingScreen):
    """What ran out, and where it went."""

    where = "oom"
    BINDINGS = bindings("oom")

    def receive(self, argument: object) -> None:
        """The run directory."""
        assert isinstance(argument, RunDirectory)
        self._directory = argument

    def about(self) -> str:
        """The run's name."""
        return clean(self._directory.name)

    def lines(self, width: int) -> Sequence[Content]:
        """First the sentences, then the reports, newest first."""
        lines: list[Content] = []
        for text in self._sentences():
            lines += Content(text).wrap(width - 2)
            lines.append(Content(""))
        reports = sorted(self._directory.oom.glob("*.json"), reverse=True)[:MOST_REPORTS]
        for path in reports:
            lines.append(Content.styled(clean(path.name), "bold $info"))
            lines += [part for text in _report(path) for part in Content(text).wrap(width - 2)]
            lines.append(Content(""))
        if not reports:
            lines.append(Content.styled("the engine has left no report of its own in oom/", "$muted"))
        return [Content.assemble(" ", line) for line in lines]

    def _sentences(self) -> Iterable[str]:
        for event in read_events(self._directory.events):
            if event["kind"] == "backoff":
                yield sentence(event) or ""


def _report(path: Path) -> Iterable[str]:
    """A report as indented lines; bytes in units that can be read."""
    try:
        found = json.loads(path.read_text("utf-8", errors="replace"))
    except OSError as error:
        return [f"cannot be read: {error.strerror or error}"]
    except ValueError:
        return ["is no JSON: it may have been cut off"]
    return list(_tree(found))


def _tree(value: Any, name: str = "", depth: int = 0) -> Iterable[str]:
    indent = "  " * depth
    if isinstance(value, dict):
        if name:
            yield f"{indent}{clean(name)}:"
        for key, part in value.items():
            yield from _tree(part, str(key), depth + bool(name))
    elif isinstance(value, list):
        yield f"{indent}{clean(name)}:"
        for part in value:
            yield from _tree(part, "-", depth + 1)
    elif name.endswith("bytes") and isinstance(value, int):
        yield f"{indent}{clean(name)}: {size(value)}"
    else:
        yield from (f"{indent}{clean(name)}: {clean(line)}" for line in str(value).splitlines() or [""])
