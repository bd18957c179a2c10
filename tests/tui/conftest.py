"""The console as a user meets it: `console(width, height)` opens it here, on the test's own folder of runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from tests.journal.conftest import Spawn, own_state, spawn
from tests.tui.console_pilot import ConsolePilot
from tests.tui.tmux_terminal import terminal
from tui.app import TunedeckApp
from tui.arguments import Flags

__all__ = ["SIZES", "Opener", "Spawn", "own_state", "spawn", "terminal"]

Opener = Callable[..., AbstractAsyncContextManager[ConsolePilot]]

SIZES = [(80, 24), (120, 36), (60, 15)]
"""What every screen is tried at."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of runs; empty."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def console(runs: Path) -> Opener:
    """Open the console at a size, with these flags; yields a Desk."""

    @asynccontextmanager
    async def opener(width: int = 80, height: int = 24, **flags: object) -> AsyncIterator[ConsolePilot]:
        app = TunedeckApp(Flags(runs=str(runs), **flags))
        async with app.run_test(size=(width, height)) as textual_pilot:
            yield ConsolePilot(app, textual_pilot)

    return opener
