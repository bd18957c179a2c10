"""The plot of the Run screen: metrics, axis, cursor, grid, and the plot as text and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.conftest import Opener
from tests.tui.recorded_runs import add, make_run
from tests.tui.screens.test_run import open_run

pytestmark = pytest.mark.asyncio


async def test_loss_can_be_seen_on_a_log_axis_smoothed_and_closer(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console() as pilot:
        await open_run(pilot)
        await pilot.sees("30")
        await pilot.sees(" loss log ")
        await pilot.press("L")
        assert not pilot.screen.panes.plot.is_log
        await pilot.press("L", "m", "plus")
        await pilot.sees("loss last half, log, smoothed")


async def test_other_metrics_are_plotted_by_key(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    add(run, lambda writer: writer.write("gpu", index=0, used_bytes=3 << 30, utilisation_percent=97,
                                         temperature_celsius=61, power_watts=300))  # fmt: skip
    async with console(120, 40) as pilot:
        await open_run(pilot)
        for label, value in METRIC_LABELS.items():
            await pilot.press("v")
            await pilot.sees(f" {label} ", value)
            assert "has recorded no" not in pilot.text
        await pilot.press("v", "V")
        await pilot.sees(" GPU power, W ")


async def test_the_mark_of_a_step_that_was_not_applied_is_behind_the_curve(console: Opener, runs: Path) -> None:
    """Regression: the legend named it, and it was nowhere, then at the step before."""
    run = make_run(runs)
    add(run, lambda writer: writer.write("warning", code="not_finite", text="step 31 is not finite", fix="", step=31))
    async with console() as pilot:
        await open_run(pilot)
        await pilot.sees("✗ not finite")
        lines = pilot.text.splitlines()
        (marked,) = [number for number, line in enumerate(lines) if line.rstrip().endswith("✗")]
        assert lines[marked + 1].split()[-1] == "31", "the axis ends at that step"


async def test_a_cursor_reads_the_plot_and_escape_removes_it(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.until(pilot.screen.panes.plot.copied, "the curve")
        await pilot.press("left")
        await pilot.sees(" step 30: 0.1333, evaluation 0.25", "│")
        await pilot.press("left", "left", "right")
        await pilot.sees(" step 29: 0.1379 ")
        await pilot.press("shift+left")
        await pilot.sees(" step 2")
        await pilot.press("escape")
        await pilot.sees("◆ evaluation")
        await pilot.click("◆", times=1)
        await pilot.sees(" step ")


async def test_all_metrics_are_shown_at_once_and_one_again(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.press("M")
        await pilot.sees(" loss  0.1333", " tokens/s  1000")
        await pilot.press("left")
        await pilot.sees("all metrics are shown; M shows one")
        await pilot.press("shift+tab", "z")
        await pilot.sees(" evaluation loss  0.25", " peak memory, MiB ", " tokens/s  1000")
        assert "more: z" not in pilot.text
        await pilot.press("M")
        await pilot.sees("◆ evaluation")


async def test_the_plot_is_copied_as_text_and_written_as_a_picture(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.until(pilot.screen.panes.plot.copied, "the curve")
        await pilot.press("y")
        await pilot.sees("copied what events shows")
        assert "redone with at most 25" in pilot.app.clipboard
        await pilot.press("tab", "tab", "tab", "y")
        await pilot.sees("copied the points of loss")
        assert pilot.app.clipboard.splitlines()[:2] == ["steps\tloss\tleast\tgreatest", "1\t4\t4\t4"]
        await pilot.press("e")
        await pilot.sees("written: ", "plot-loss.svg")
        assert run.name in (run.path / "plot-loss.svg").read_text()


METRIC_LABELS = {
    "evaluation loss": "0.25", "learning rate": "0.0001", "gradient norm": "1", "tokens/s": "1000",
    "peak memory, MiB": "58", "GPU memory, GiB": "3", "GPU use, %": "98", "GPU temperature, °C": "",
    "GPU power, W": "",
}  # fmt: skip
"""The titles of plots after the loss, in the order of the key, with a label of the y axis."""
