"""Panes of the Run screen: what stands beside each other on a wide screen, enlarging, scrolling, and the way back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.conftest import Opener
from tests.tui.recorded_runs import add, make_run
from tests.tui.screens.test_run import open_run, shown_panes

pytestmark = pytest.mark.asyncio

SAMPLES = [{"prompt": f"may {day} -> ", "answer": f"05-{day}", "reference": f"05-{day}"} for day in range(10, 40)]


async def test_at_200x50_samples_stand_beside_memory_and_events(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    add(run, lambda writer: writer.write("eval", step=30, metrics={"loss": 0.2}, samples=SAMPLES))
    async with console(200, 50) as pilot:
        await open_run(pilot)
        await pilot.sees("answers of step 30, and references", "may 10 ->", "as written", "redone with at most 25")
        assert "may 39 ->" not in pilot.text
        await pilot.press("tab", "tab", "tab", "end")
        assert pilot.screen.panes.choice.active == "samples"
        await pilot.sees("may 39 ->")
        await pilot.press("z")
        assert shown_panes(pilot) == ["samples"]
        await pilot.textual_pilot.resize_terminal(120, 36)
        await pilot.press("z")
        await pilot.until(lambda: {"samples", "memory"} & set(shown_panes(pilot)) == {"samples"}, "in memory's place")
        await pilot.press("shift+tab")
        await pilot.sees(" memory   answers: tab", "as written")
        assert "samples" not in shown_panes(pilot)


async def test_the_way_back_is_the_same_by_key_and_by_click(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(120, 36) as pilot:
        await open_run(pilot)
        for by_key in (True, False):
            await pilot.press("z")
            assert shown_panes(pilot) == ["events"]
            await (pilot.press("escape") if by_key else pilot.click("esc back"))
            assert len(shown_panes(pilot)) > 3
        await pilot.click("esc back")
        await pilot.until(lambda: pilot.screen.screen_name == "runs", "the list of runs")


async def test_scroll_keys_leave_a_hidden_pane_alone(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.press("shift+tab", "z")
        assert shown_panes(pilot) == ["loss"]
        await pilot.press("k")
        await pilot.sees("this pane does not scroll; tab goes to the next")


async def test_keys_do_not_move_a_table_behind_an_enlarged_plot(console: Opener, runs: Path) -> None:
    make_run(runs, "one")
    make_run(runs, "two")
    async with console(120, 36) as pilot:
        await pilot.sees("one", "two")
        await pilot.press("space", "j", "space", "c")
        await pilot.until(lambda: pilot.screen.screen_name == "compare" and pilot.screen._found, "the table")
        await pilot.press("z", "G")
        assert pilot.screen.query_one("#differences").cursor == 0
        await pilot.press("tab", "G")
        assert pilot.screen.query_one("#differences").cursor > 0
