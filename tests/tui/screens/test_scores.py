"""Scores on the Run and Compare screens: a bar per checkpoint, answers beside references, gains, the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from engine.journal.evaluations import Evaluation, append_evaluation, now, scoring
from tests.tui.conftest import Opener
from tests.tui.recorded_runs import add, make_run

pytestmark = pytest.mark.asyncio

SAMPLES = [
    {"prompt": "Where is the table?", "answer": "(1,2),(30,40)", "reference": "(1,2),(30,44)"},
    {"prompt": "And the chair?", "answer": "none", "reference": "none"},
]


def scored(run: RunDirectory, step: int, mean_iou: float) -> None:
    """Record scores of one checkpoint of a run on 20 samples, as `tunedeck eval` does."""
    values = [mean_iou + 0.01 * (number - 9.5) for number in range(20)]
    metrics = {"loss": 2.0 - mean_iou, "mean_iou": mean_iou}
    found = Evaluation(now(), step, metrics, 20, "data", {}, SAMPLES, f"weights {step}", ["held out"])
    with scoring(run, lambda text: None):
        append_evaluation(run, found, {"mean_iou": values})


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (60, 15)], ids=str)
async def test_a_bar_for_each_checkpoint_and_answers_beside_references(
    console: Opener, runs: Path, size: tuple[int, int]
) -> None:
    run = make_run(runs)
    for step, value in ((0, 0.1), (10, 0.6), (30, 0.45)):
        scored(run, step, value)
    async with console(*size) as pilot:
        await pilot.sees(run.name[-4:])
        await pilot.press("enter")
        await pilot.until(lambda: pilot.screen.screen_name == "run" and pilot.screen.run_watch.evaluations)
        await pilot.press("b")
        await pilot.sees("scored on held out (20 samples)", "mean iou")
        for _ in range(40):
            if "And the chair?" in pilot.text:
                break
            assert "step 10" in pilot.text or "(1,2),(30,44)" in pilot.text or "loss" in pilot.text
            await pilot.press("down")
        await pilot.sees("And the chair?", "none")
        await pilot.press("home", *["up"] * 60)
        await pilot.sees("base", "0.6", "*")
        await pilot.press("escape")
        await pilot.until(lambda: "scored on held out" not in pilot.text)


async def test_samples_of_training_are_shown_and_a_run_without_scores_says_how_to_get_them(
    console: Opener, runs: Path
) -> None:
    run = make_run(runs, status="queued")
    async with console(80, 24) as pilot:
        await pilot.sees("queued")
        await pilot.press("enter")
        await pilot.until(lambda: pilot.screen.screen_name == "run" and pilot.screen.run_watch.summary)
        await pilot.press("b")
        await pilot.sees("no scores yet: tunedeck eval")
        add(run, lambda writer: writer.write("eval", step=4, metrics={"loss": 1.5}, samples=SAMPLES))
        await pilot.until(lambda: pilot.screen.run_watch.state.evals)
        await pilot.press("b")
        await pilot.sees("scored during training", "answers of step 4", "(1,2),(30,44)")


async def test_answers_of_earlier_evaluations_are_gone_through(console: Opener, runs: Path) -> None:
    run = make_run(runs, status="queued")

    def evaluate(step: int, answer: str) -> None:
        samples = [{"prompt": "Who?", "answer": answer}, *SAMPLES]
        add(run, lambda writer: writer.write("eval", step=step, metrics={"loss": 1.5}, samples=samples))

    for step, answer in ((4, "nobody"), (8, "somebody")):
        evaluate(step, answer)
    async with console(100, 30) as pilot:
        await pilot.press("enter")
        await pilot.until(lambda: pilot.screen.screen_name == "run" and len(pilot.screen.run_watch.state.evals) == 2)
        await pilot.press("b")
        await pilot.sees("answers of step 8, and references  (2 of 2", "somebody")
        await pilot.press("right_square_bracket")
        await pilot.sees("there are no later answers")
        await pilot.press("left_square_bracket")
        await pilot.sees("answers of step 4, and references  (1 of 2", "nobody", "(1,2),(30,44)")
        await pilot.press("right_square_bracket")
        await pilot.sees("answers of step 8, and references  (2 of 2")


async def test_the_best_of_several_models_is_marked_and_the_gains_are_named(console: Opener, runs: Path) -> None:
    found = [make_run(runs, name) for name in ("language", "vision", "joint")]
    for run, value in zip(found, (0.3, 0.5, 0.8), strict=True):
        scored(run, 10, value - 0.1)
        scored(run, 30, value)
    unscored = make_run(runs, "other")
    async with console(120, 36) as pilot:
        pilot.app.open_screen("compare", [*found, unscored])
        await pilot.until(lambda: pilot.screen.screen_name == "compare")
        await pilot.until(lambda: pilot.screen._found is not None)
        await pilot.press("z", "tab")
        await pilot.sees("mean iou", "0.8 *", "gain over A", "+0.5", "0.5 better than", "95 % interval")
        await pilot.sees("step 10", "step 30")
        bars = [line.count("█") for line in pilot.text.splitlines() if line.strip().startswith("step 30")]
        assert bars == [12, 20, 32], "on one scale for all runs, whose end is a score of 1"
