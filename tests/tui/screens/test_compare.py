"""The Compare screen: curves over steps, tokens or time, and a table of differing settings with the best scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventWriter
from tests.journal.event_fields import step_fields
from tests.tui.conftest import SIZES, Opener
from tests.tui.console_pilot import ConsolePilot
from tui.plot.run_curve import RunCurve

pytestmark = pytest.mark.asyncio

SPEC = """name = "{name}"
[profile]
name = "p"
[profile.device]
kind = "cpu"
[recipe]
name = "r"
[recipe.model]
id = "builtin:tiny"
[recipe.train]
learning_rate = {rate}
"""


def finished(runs: Path, name: str, *, rate: float, losses: list[float], tokens: int = 100) -> RunDirectory:
    run = create_run_directory(runs, name, SPEC.format(name=name, rate=rate), {})
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        for step, loss in enumerate(losses, 1):
            writer.write("step", **{**step_fields(step), "loss": loss, "tokens": tokens, "step_seconds": 0.5})
        writer.write("eval", step=len(losses), metrics={"loss": losses[-1]})
        writer.write("run_finished", status="done", exit_code=0, result="model")
    return run


async def open_compare(pilot: ConsolePilot, *runs: RunDirectory) -> None:
    pilot.app.open_screen("compare", list(runs))
    await pilot.until(lambda: pilot.screen.screen_name == "compare")


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_curves_table_and_letters_are_there(console: Opener, runs: Path, size: tuple[int, int]) -> None:
    slow = finished(runs, "slow", rate=1e-4, losses=[4.0, 3.5, 3.2])
    fast = finished(runs, "fast", rate=1e-3, losses=[4.0, 2.0, 1.0])
    async with console(*size) as pilot:
        await open_compare(pilot, slow, fast)
        await pilot.sees("A", "B", "loss over steps")
        if size == (60, 15):
            await pilot.sees("tab: table")
            await pilot.press("tab")
        await pilot.sees(slow.name, fast.name)


async def test_an_axis_is_logarithmic_by_itself_and_no_name_stands_twice(console: Opener, runs: Path) -> None:
    """Regression: of losses between 5 and 0.005 all but the first tenth was one flat line, and below the plot stood the
    names that the table below them begins with."""
    slow = finished(runs, "slow", rate=1e-4, losses=[4.0, 3.5, 3.2])
    fast = finished(runs, "fast", rate=1e-3, losses=[4.0, 0.2, 0.02])
    async with console(80, 24) as pilot:
        await open_compare(pilot, slow, fast)
        await pilot.sees("loss over steps, log axis", f"{fast.name} done")
        assert pilot.text.count("fast") == 1
        await pilot.press("L")
        await pilot.until(lambda: "log axis" not in pilot.text.split("loss over steps")[1][:20], "a linear axis")


async def test_the_scores_of_four_runs_are_whole_at_80_columns(console: Opener, runs: Path) -> None:
    """Regression: "0.00444…" stood in the last column, and in the last line beside the arrow."""
    names = ("a", "b", "c", "d")
    four = [finished(runs, name, rate=1e-3, losses=[4.0, 0.004446 + n / 1e6]) for n, name in enumerate(names)]
    async with console(80, 36) as pilot:
        await open_compare(pilot, *four)
        await pilot.sees("0.004446 *", "0.004447", "0.004448", "0.004449")
        assert "…" not in pilot.text


async def test_plot_and_table_are_enlarged_in_turn(console: Opener, runs: Path) -> None:
    slow, fast = (finished(runs, name, rate=1e-4, losses=[4.0, 3.5]) for name in ("slow", "fast"))
    async with console(120, 36) as pilot:
        await open_compare(pilot, slow, fast)
        await pilot.sees("loss over steps", f"{slow.name} done")
        await pilot.press("z")
        await pilot.sees("tab: table", "2 steps")
        assert "done" not in pilot.text
        await pilot.press("tab")
        await pilot.sees("tab: plot", f"{slow.name} done")
        await pilot.press("escape")
        await pilot.sees("2 steps", slow.name)


async def test_only_what_differs_is_listed_and_the_best_carries_a_star(console: Opener, runs: Path) -> None:
    slow = finished(runs, "slow", rate=1e-4, losses=[4.0, 3.5])
    fast = finished(runs, "fast", rate=1e-3, losses=[4.0, 1.0])
    async with console(120, 36) as pilot:
        await open_compare(pilot, slow, fast)
        await pilot.sees("train.learning_rate", "0.0001", "0.001", "1 *")
        assert "model.id" not in pilot.text


async def test_the_axis_goes_round_by_key(console: Opener, runs: Path) -> None:
    run, other = (finished(runs, name, rate=1e-4, losses=[2.0, 1.0], tokens=500) for name in ("a", "b"))
    async with console(120, 36) as pilot:
        await open_compare(pilot, run, other)
        await pilot.sees("loss over steps", "2 steps")
        await pilot.press("X")
        await pilot.sees("loss over tokens", "1,000 tokens")
        await pilot.press("X")
        await pilot.sees("loss over time", "0:01")
        await pilot.press("L", "m")
        await pilot.sees("log axis", "smoothed")


async def test_other_metrics_a_cursor_and_a_picture_of_several_runs(
    console: Opener, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = finished(runs, "slow", rate=1e-4, losses=[4.0, 3.5, 3.25])
    fast = finished(runs, "fast", rate=1e-3, losses=[4.0, 2.0])
    monkeypatch.chdir(tmp_path)
    async with console(120, 36) as pilot:
        await open_compare(pilot, slow, fast)
        await pilot.sees("loss over steps", "3 steps")
        await pilot.press("left", "left")
        await pilot.sees("step 2:  A 3.5  B 2 ")
        await pilot.press("escape", "y")
        await pilot.sees("copied the points of loss")
        assert pilot.app.clipboard.splitlines()[1:] == ["1\t4\t4", "2\t3.5\t2", "3\t3.25\t"]
        await pilot.press("v", "v")
        await pilot.sees("learning rate over steps")
        await pilot.until(lambda: len(pilot.screen.plot.copied(["a", "b"]).splitlines()) == 4, "the curves")
        await pilot.press("e")
        await pilot.sees("written: ", "plot-compare-learning-rate.svg")
        assert fast.name in (tmp_path / "plot-compare-learning-rate.svg").read_text()


async def test_without_marked_runs_it_says_how_to_mark_them(console: Opener) -> None:
    async with console() as pilot:
        await pilot.press("5")
        await pilot.sees("1 opens Runs: space marks a run there, and c compares the marked ones")
        await pilot.press("X")
        await pilot.sees("no run is marked")


async def test_a_run_that_vanishes_leaves_the_screen_up(console: Opener, runs: Path) -> None:
    a, b = (finished(runs, name, rate=1e-4, losses=[2.0, 1.0]) for name in ("a", "b"))
    async with console(120, 36) as pilot:
        await open_compare(pilot, a, b)
        await pilot.sees(a.name)
        a.path.rename(runs / ".gone")
        await pilot.sees("its folder was removed", "loss over steps", "done")


async def test_what_a_resume_voids_leaves_every_axis(runs: Path) -> None:
    run = finished(runs, "a", rate=1e-4, losses=[4.0, 3.0, 2.0])
    with EventWriter(run) as writer:
        writer.write("resumed", step=1, **{"from": "checkpoints/step-00000001"})
        writer.write("step", **{**step_fields(2), "loss": 1.5, "tokens": 100, "step_seconds": 0.5})
    curve = RunCurve(run)
    while curve.read_more(seconds=1.0):
        pass
    assert curve.over("steps").end == 2 and curve.over("tokens").end == 200 and curve.over("time").end == 1.0


async def test_a_step_written_in_another_order_of_fields_counts_as_well(runs: Path) -> None:
    run = finished(runs, "a", rate=1e-4, losses=[4.0])
    with run.events.open("a") as file:
        fields = {**step_fields(2), "loss": 3.0, "step_seconds": 2, "tokens": 50}
        event = {"seq": 99, "time": "2026-11-20T20:58:00.123Z", "stage": "", "rank": 0, **fields}
        file.write(json.dumps({"kind": "step", **dict(reversed(event.items()))}) + "\n")
        file.write('{"kind":"step","step":3,"epoch":0,"loss":-,"tokens":5,"step_seconds":1}\n')
    curve = RunCurve(run)
    while curve.read_more(seconds=1.0):
        pass
    assert [curve.over(axis).end for axis in ("steps", "tokens", "time")] == [2.0, 150.0, 2.5]
    assert curve.over("steps").points == 2


async def test_runs_are_marked_on_the_list_and_compared_by_keys(console: Opener, runs: Path) -> None:
    a, b = (finished(runs, name, rate=1e-4, losses=[2.0, 1.0]) for name in ("a", "b"))
    async with console(120, 36) as pilot:
        await pilot.sees(b.name)
        await pilot.press("c")
        await pilot.sees("mark two or more runs")
        await pilot.press("space", "space")
        await pilot.sees("2 marked", "◆")
        await pilot.press("c")
        await pilot.sees("loss over steps", a.name, b.name)


async def test_a_mark_goes_with_its_run(console: Opener, runs: Path) -> None:
    a = finished(runs, "a", rate=1e-4, losses=[2.0])
    async with console() as pilot:
        await pilot.sees(a.name)
        await pilot.press("space")
        await pilot.sees("1 marked")
        a.path.rename(runs / ".gone")
        await pilot.until(lambda: "marked" not in pilot.text)


async def test_curves_that_lie_on_one_another_are_told(console: Opener, runs: Path) -> None:
    same = [finished(runs, name, rate=1e-3, losses=[4.0, 2.0, 1.0]) for name in ("one", "two")]
    other = finished(runs, "other", rate=1e-3, losses=[4.0, 3.0, 2.0])
    async with console() as pilot:
        await open_compare(pilot, same[0], other, same[1])
        await pilot.sees(
            "loss over steps (A, C: one line)", f"A {same[0].name}", f"B {other.name}", f"C {same[1].name}"
        )
