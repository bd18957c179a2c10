"""The table of screens. A screen's module is imported when the screen is first opened, so none slows the start.

A kept screen stays in memory while another is shown, so it returns in the state in which it was left.
"""

from __future__ import annotations

from typing import NamedTuple


class ScreenRow(NamedTuple):
    """One screen: its name in the key table, the digit that opens it (empty if there is none), its title and its
    class."""

    name: str
    key: str
    title: str
    module: str
    class_name: str
    kept: bool


SCREENS: tuple[ScreenRow, ...] = (
    ScreenRow("runs", "1", "Runs", "tui.screens.runs", "RunsScreen", kept=True),
    ScreenRow("launch", "2", "Launch", "tui.screens.launch", "LaunchScreen", kept=True),
    ScreenRow("library", "3", "Library", "tui.screens.library", "LibraryScreen", kept=True),
    ScreenRow("editor", "", "Edit", "tui.screens.editor", "EditorScreen", kept=False),
    ScreenRow("queue", "4", "Queue", "tui.screens.queue", "QueueScreen", kept=True),
    ScreenRow("compare", "5", "Compare", "tui.screens.compare", "CompareScreen", kept=True),
    ScreenRow("run", "", "Run", "tui.screens.run", "RunScreen", kept=False),
    ScreenRow("oom", "", "Out-of-memory report", "tui.screens.oom", "OomScreen", kept=False),
    ScreenRow("memory", "", "Memory by phase", "tui.screens.memory", "MemoryScreen", kept=False),
    ScreenRow("help", "", "Help", "tui.screens.help", "HelpScreen", kept=False),
    ScreenRow("doctor", "6", "Doctor", "tui.screens.doctor", "DoctorScreen", kept=True),
    ScreenRow("chat", "7", "Chat", "tui.screens.chat", "ChatScreen", kept=True),
)


def screen_row(name: str) -> ScreenRow:
    """The row of the screen called `name`. Raises KeyError if the table has no such screen."""
    return {row.name: row for row in SCREENS}[name]
