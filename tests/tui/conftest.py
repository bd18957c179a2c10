"""Fixtures of the console's tests: `console(width, height)` opens the console on `runs`, the test's own folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.journal.conftest import Spawn, own_state, spawn
from tests.tui.console_pilot import ConsolePilot
from tests.tui.tmux_terminal import terminal
from tui.app import TunedeckApp
from tui.arguments import Flags

__all__ = ["SIZES", "Opener", "Spawn", "own_state", "spawn", "terminal"]

Opener = Callable[..., AbstractAsyncContextManager[ConsolePilot]]

SIZES = [(80, 24), (120, 36), (60, 15)]
"""Terminal sizes at which screens are tested."""


@pytest.fixture(autouse=True)
def data_are_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Launch screen starts no process that reads data unasked, which takes seconds; tests of that set the pause
    back."""
    monkeypatch.setattr("tui.screens.launch.LENGTHS_SECONDS", 3600.0)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """An empty runs folder."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def console(runs: Path) -> Opener:
    """A context manager, called with width, height and command-line flags, that opens the console on `runs` and yields
    a ConsolePilot."""

    @asynccontextmanager
    async def opener(width: int = 80, height: int = 24, **flags: Any) -> AsyncIterator[ConsolePilot]:
        app = TunedeckApp(Flags(runs=str(runs), **flags))
        async with app.run_test(size=(width, height)) as textual_pilot:
            yield ConsolePilot(app, textual_pilot)

    return opener
