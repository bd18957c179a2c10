"""The ranks of a run on the Run screen: a slow rank and one that was out of memory stand out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventWriter
from tests.journal.event_fields import backoff_fields, step_fields
from tests.tui.conftest import SIZES, Opener
from tests.tui.console_pilot import ConsolePilot
from tests.tui.recorded_runs import COMPONENTS, SPEC
from tui.run.ranks import rank_lines, rank_summaries, ranks_in_brief
from tui.run.watch import RunWatch

QUICK, SLOW = 0.1, 0.25


def rank_report(busy_seconds: float, **other: Any) -> dict[str, Any]:
    """A rank's report in the event of a step."""
    return {
        "micro_batches": 1, "largest_micro_batch": 16, "samples": 16, "busy_seconds": busy_seconds,
        "step_seconds": 0.3, "peak_bytes": 40 << 20, "allocated_bytes": 13 << 20, **other,
    }  # fmt: skip


def run_of_ranks(runs: Path, count: int = 4, *, slow: int | None = None, short: int | None = None) -> RunDirectory:
    """A run of 30 steps and some ranks; one may be slow, and one may have run out of memory in steps 2 and 15."""
    run = create_run_directory(runs, "ranks", SPEC.format(name="ranks", model="builtin:tiny", kind="metered"), {})
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=count, versions={}, capacity_bytes=64 << 20)
        writer.write("plan", predicted={"peak_bytes": 41 << 20, "components": COMPONENTS}, verdict="fits")
        writer.write("stage_started", max_steps=100)
        for step in range(1, 31):
            if short is not None and step in (2, 15):
                writer.write("backoff", **backoff_fields(step, failed_rank=short, sequences_after=8))
            each = [rank_report(SLOW if rank == slow else QUICK) for rank in range(count)]
            writer.write("step", **step_fields(step, ranks=each, largest_micro_batch=16, micro_batches=1))
        writer.write("run_finished", status="done", exit_code=0, result="model")
    return run


def watched(run: RunDirectory) -> RunWatch:
    watch = RunWatch(run)
    while watch.read_more(seconds=5.0) and watch.unread_share:
        pass
    return watch


async def open_run(pilot: ConsolePilot) -> None:
    await pilot.until(lambda: pilot.screen.screen_name == "runs" and pilot.screen.chosen, "a run in the list")
    await pilot.press("enter")
    await pilot.until(lambda: pilot.screen.screen_name == "run" and pilot.screen.status, "the run")


@pytest.mark.asyncio
@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_a_straggler_and_a_rank_short_of_memory_are_recognised_at_every_size(
    console: Opener, runs: Path, width: int, height: int
) -> None:
    run_of_ranks(runs, slow=3, short=1)
    async with console(width, height) as pilot:
        await open_run(pilot)
        await pilot.until(lambda: pilot.screen.panes.choice.has_ranks, "the ranks")
        while not pilot.screen.query_one("#ranks").region.area:
            await pilot.press("tab")
        await pilot.sees("computes", "waits", "peak", "100 ms", "16 × 1", "40 MiB")
        lines = {line.split()[0]: line for line in pilot.text.splitlines() if "16 × 1 " in line and "MiB" in line}
        assert sorted(lines) == ["0", "1", "2", "3"]
        assert [rank for rank, line in lines.items() if "slow" in line] == ["3"]
        assert [rank for rank, line in lines.items() if "▲ o" in line] == ["1"]


@pytest.mark.asyncio
async def test_the_figures_name_a_slow_rank_without_a_key(console: Opener, runs: Path) -> None:
    run_of_ranks(runs, slow=3)
    async with console(80, 24) as pilot:
        await open_run(pilot)
        await pilot.sees("ranks 4; slow: 3")


@pytest.mark.asyncio
async def test_a_run_of_one_process_has_no_pane_of_ranks(console: Opener, runs: Path) -> None:
    run_of_ranks(runs, 0)
    async with console(80, 24) as pilot:
        await open_run(pilot)
        await pilot.sees("events", "memory", "log")
        assert "ranks " not in pilot.text.splitlines()[16] and not pilot.screen.query_one("#ranks").region.area


def test_each_rank_says_how_long_it_computed_and_waited(runs: Path) -> None:
    rows = rank_summaries(watched(run_of_ranks(runs, slow=2)))
    assert [round(row.busy_seconds, 3) for row in rows] == [QUICK, QUICK, SLOW, QUICK]
    assert [round(row.wait_seconds, 3) for row in rows] == [0.2, 0.2, 0.05, 0.2]
    assert [round(row.times_slower, 2) for row in rows] == [0, 0, 2.5, 0]


def test_failures_are_counted_for_the_rank_they_struck(runs: Path) -> None:
    watch = watched(run_of_ranks(runs, short=1))
    assert [(row.failures, row.failed_at) for row in rank_summaries(watch)] == [(0, 0), (2, 15), (0, 0), (0, 0)]
    assert "out of memory in step 15, 2 times" in rank_lines(watch, 120, 9, str)[2].plain


def test_what_ran_out_long_ago_is_told_and_is_no_alarm(runs: Path) -> None:
    watch = watched(run_of_ranks(runs, short=1))
    assert rank_summaries(watch)[1].is_noteworthy
    with EventWriter(watch.directory) as writer:
        for step in range(31, 61):
            writer.write("step", **step_fields(step, ranks=[rank_report(QUICK)] * 4))
    while watch.read_more(seconds=5.0) and watch.unread_share:
        pass
    assert not rank_summaries(watch)[1].is_noteworthy
    assert "out of memory in step 15" in rank_lines(watch, 120, 9, str)[2].plain


@pytest.mark.asyncio
async def test_at_120x36_the_figures_are_whole_beside_the_ranks(console: Opener, runs: Path) -> None:
    run = run_of_ranks(runs)
    with EventWriter(run) as writer:
        writer.write("eval", step=30, metrics={"loss": 1.0, "perplexity": 2.7, "exact_match": 0.5})
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.sees("perplexity", "samples lost", "computes")


def test_with_two_ranks_the_slower_is_held_against_the_other(runs: Path) -> None:
    assert ranks_in_brief(watched(run_of_ranks(runs, 2, slow=0))) == "2; slow: 0"


def test_of_many_ranks_those_worth_a_look_are_always_shown(runs: Path) -> None:
    lines = [line.plain for line in rank_lines(watched(run_of_ranks(runs, 32, slow=30, short=17)), 80, 9, str)]
    assert len(lines) == 9 and lines[-1].strip() == "and 25 more"
    assert [line.split()[0] for line in lines[1:-1]] == ["0", "1", "2", "3", "4", "17", "30"]


def test_in_ascii_nothing_else_is_drawn(runs: Path) -> None:
    from tui.theme import glyphs

    lines = rank_lines(watched(run_of_ranks(runs, slow=3, short=1)), 120, 9, lambda text: glyphs(text, ascii_only=True))
    assert all(line.plain.isascii() for line in lines)


def test_what_cannot_be_shown_of_a_foreign_run_is_left_out(runs: Path) -> None:
    run = run_of_ranks(runs, 2)
    with EventWriter(run) as writer:
        writer.write("step", **step_fields(31, ranks=[{"busy_seconds": "[bold]long"}, None]))
    assert rank_summaries(watched(run)) == []
