"""Follow the engine's log: the lines at its end at first, then each line that is added, with its level.

Try: `tail = LogTail(resolve_run("last", None).log); tail.refresh(); print(tail.take())`
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from engine.journal.event_text import clean

READ_BYTES = 64 * 1024
"""How much of the end of a long log is read: also when more than this was added since the last reading."""

ESCAPE_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""A sequence that would set colours, move the cursor or set the terminal's title (ECMA-48)."""

ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|^[\w.]*(?:Error|Exception)\b|^(?:Segmentation fault|Killed)\b")
WARNING = re.compile(r"\bWARN(?:ING)?\b|\b\w*Warning:")
TRACEBACK = "Traceback (most recent call last)"


class LogLine(NamedTuple):
    """A line of the log without control characters; its indentation is preserved."""

    text: str
    level: str
    """"error" (with all lines of a Python traceback), "warning" or "info"."""


class LogTail:
    """The end of a log file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = (-1, -1)
        self._offset = 0
        self._begun = b""
        """The bytes of the last line, as long as it has no end."""
        self._in_traceback = False
        self._new: list[LogLine] = []

    @property
    def unfinished(self) -> LogLine | None:
        """The last line, if it has no end yet, such as a progress bar."""
        text = _plain(self._begun)
        return LogLine(text, "info") if text.strip() else None

    def take(self) -> list[LogLine]:
        """Return the lines that were completed since the last call."""
        taken, self._new = self._new, []
        return taken

    def refresh(self) -> bool:
        """Read what was added to the file; returns whether the file has changed. A file that cannot be read has not."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_size, found.st_mtime_ns) == self._seen:
                    return False
                self._seen = (found.st_size, found.st_mtime_ns)
                begin = self._begin(found.st_size)
                torn = begin not in (0, self._offset)
                file.seek(begin)
                data = file.read(found.st_size - begin)
        except OSError:
            return False
        self._offset = begin + len(data)
        *lines, self._begun = (self._begun + data).split(b"\n")
        self._begun = self._begun[-READ_BYTES:]
        lines = lines[1:] if torn else lines
        self._new += [line for raw in lines if (line := self._line(raw)) is not None]
        return True

    def _begin(self, size: int) -> int:
        """The place from which to read a file of this size. Where something is skipped, or the file was written anew, a
        line may begin in the middle."""
        if size < self._offset or size - self._offset > READ_BYTES:
            self._begun, self._in_traceback = b"", False
            return max(0, size - READ_BYTES)
        return self._offset

    def _line(self, raw: bytes) -> LogLine | None:
        """A line with its level; None for an empty one."""
        text = _plain(raw)
        if not text.strip():
            return None
        if self._in_traceback and not text.startswith(" "):
            self._in_traceback = False
            return LogLine(text, "error")  # the exception itself
        self._in_traceback = self._in_traceback or text.startswith(TRACEBACK)
        return LogLine(text, "error" if self._in_traceback else level_of(text))


def level_of(text: str) -> str:
    """The level of a line of the log: "error", "warning" or "info"."""
    return "error" if ERROR.search(text) else "warning" if WARNING.search(text) else "info"


def _plain(raw: bytes) -> str:
    """A line without escape codes and control characters; its indentation is preserved. Of a line that overwrites
    itself with carriage returns, as a progress bar does, the last text."""
    line = ESCAPE_CODE.sub("", raw.decode("utf-8", errors="replace"))
    text = line.rstrip().rpartition("\r")[2].expandtabs()
    return text[: len(text) - len(text.lstrip(" "))] + clean(text)
