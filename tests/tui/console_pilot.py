"""`ConsolePilot` presses keys in an open console, reads its screen as text and waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from textual.pilot import Pilot

from tui.app import TunedeckApp

PATIENCE_SECONDS = 180.0
"""How long a test waits for something to appear: long, for a busy machine that has to import torch for an engine."""


@dataclass(frozen=True)
class ConsolePilot:
    """An open console."""

    app: TunedeckApp
    textual_pilot: Pilot[None]

    @property
    def text(self) -> str:
        """The whole screen as text, line by line."""
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())

    @property
    def screen(self) -> Any:
        """The screen that is shown."""
        return self.app.screen

    async def press(self, *keys: str) -> None:
        """Press keys and wait until the console is idle."""
        await self.textual_pilot.press(*keys)
        await self.textual_pilot.pause()

    async def click(self, text: str, *, times: int = 1) -> None:
        """Click the first place on the screen that shows `text`, and wait until the console is idle."""
        lines = self.text.splitlines()
        y = next(number for number, line in enumerate(lines) if text in line)
        await self.textual_pilot.click(offset=(cell_len(lines[y].partition(text)[0]), y), times=times)
        await self.textual_pilot.pause()

    async def until(self, holds: Callable[[], object], what: str = "") -> None:
        """Wait until `holds()` is true. Fails with the screen's text after PATIENCE_SECONDS."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"never came: {what}\n{self.text}"
            await asyncio.sleep(0.02)
            await self.textual_pilot.pause()

    async def sees(self, *texts: str) -> None:
        """Wait until all of these texts are on the screen."""
        await self.until(lambda: all(text in self.text for text in texts), " and ".join(texts))
