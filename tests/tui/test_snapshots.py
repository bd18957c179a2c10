"""Three screens in every theme, compared with stored pictures of them.

TUNEDECK_ACCEPT=1 stores the present pictures; look at the files before committing them.
"""

from __future__ import annotations

import os
from datetime import datetime, tzinfo
from pathlib import Path

import pytest

from tests.tui.conftest import Opener
from tests.tui.recorded_runs import make_run

STORED = Path(__file__).with_name("snapshots")


def assert_matches(name: str, picture: str) -> None:
    """Assert that `picture` equals the stored picture `name`; with TUNEDECK_ACCEPT, store `picture` instead."""
    path = STORED / f"{name}.svg"
    if os.environ.get("TUNEDECK_ACCEPT"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(picture, "utf-8")
    assert picture == path.read_text("utf-8"), f"{name} looks different; if that is meant: TUNEDECK_ACCEPT=1"


class Noon(datetime):
    """The clock by which the age of a run is told stands still."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Noon:
        return cls(2026, 11, 26, 12, tzinfo=tz)


@pytest.mark.asyncio
@pytest.mark.parametrize("theme", ["dark", "light", "ansi"])
async def test_the_list_of_runs_and_a_run_look_as_they_did(
    console: Opener, runs: Path, theme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.run.table.datetime", Noon)
    make_run(runs).path.rename(runs / "20261120T205800Z-demo")
    async with console(60, 15, theme=theme) as pilot:
        await pilot.sees("✓ done")
        await pilot.textual_pilot.pause()
        assert_matches(f"runs-{theme}", pilot.app.export_screenshot())
        await pilot.press("enter")
        await pilot.sees("◆", "finished; result in ", "/model")
        await pilot.textual_pilot.pause()
        assert_matches(f"run-{theme}", pilot.app.export_screenshot())


@pytest.mark.asyncio
@pytest.mark.parametrize("theme", ["dark", "light", "ansi"])
async def test_the_launch_screen_looks_as_it_did(console: Opener, theme: str) -> None:
    async with console(60, 15, theme=theme, profile="demo", recipe="demo") as pilot:
        await pilot.sees("fits with micro-batch 17", "activations", "s start")
        await pilot.until(lambda: pilot.screen.state.advice() and pilot.screen.state.time(), "advice and time")
        await pilot.textual_pilot.pause()
        assert_matches(f"launch-{theme}", pilot.app.export_screenshot())
