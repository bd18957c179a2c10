"""The Run screen: its panes in every state and at every size, and the requests that its keys write."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from tests.journal.event_fields import backoff_fields, step_fields
from tests.tui.conftest import SIZES, Opener
from tests.tui.console_pilot import ConsolePilot
from tests.tui.recorded_runs import add, make_run
from tests.tui.recorded_stages import make_staged_run
from tui.app import TunedeckApp
from tui.run.pane_choice import PANES

pytestmark = pytest.mark.asyncio


async def open_run(pilot: ConsolePilot) -> None:
    """Open the run that the list's cursor is on."""
    await pilot.until(lambda: pilot.screen.screen_name == "runs" and pilot.screen.chosen, "a run in the list")
    await pilot.press("enter")
    await pilot.until(lambda: pilot.screen.screen_name == "run" and pilot.screen.status, "the run")


def shown_panes(pilot: ConsolePilot) -> list[str]:
    """The panes that take room on the screen."""
    return [name for name in PANES if pilot.screen.query_one(f"#{name}").region.area]


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_state_and_progress_are_in_sight_at_every_size(
    console: Opener, runs: Path, width: int, height: int
) -> None:
    run = make_run(runs)
    async with console(width, height) as pilot:
        await open_run(pilot)
        await pilot.sees(run.name[:20], "✓ done", "(simulated device)", "step 30 of 100  30 %", "/model")


async def test_alerts_are_marked_on_the_plot(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    with EventWriter(run) as writer:
        for step, code in ((9, "gradient_spike"), (14, "plateau"), (18, "slow_data")):
            writer.write("warning", code=code, text=code, fix="", step=step)
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.sees("↑ gradient spike", "─ plateau", "≈ slow data", "▲ oom")


async def test_at_80x24_the_loss_stands_over_one_pane_of_words(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(80, 24) as pilot:
        await open_run(pilot)
        await pilot.sees("loss 0.1333", "≤25 × 2, batch 64", "eval loss 0.25", "redone with at most 25", " log ")
        await pilot.press("shift+tab")
        await pilot.sees("exact match    8.2 %", "learning rate  0.0001")
        await pilot.press("tab", "tab", "tab")
        await pilot.sees("as written", "129.0 MiB, 202 %", "64 MiB simulated", "measured", "58.0 MiB, 91 %")
        assert "redone with" not in pilot.text


async def test_at_120x36_every_pane_is_in_sight(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    run.log.write_text("a line of the log\n")
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.sees("tokens/s", "redone with at most 25", "activations", "120 MiB", "49 MiB", "a line of the log")
        await pilot.press("tab", "z")
        await pilot.sees("a line of the log")
        assert shown_panes(pilot) == ["log"]
        await pilot.press("escape")
        assert shown_panes(pilot) == ["loss", "events", "log", "memory"]


async def test_at_60x15_tab_goes_through_the_panes_one_at_a_time(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(60, 15) as pilot:
        await open_run(pilot)
        for pane in ("loss", "figures", "events", "log", "memory", "loss"):
            assert shown_panes(pilot) == [pane]
            await pilot.press("tab")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("paused", ["‖ paused", "r resumes it"]),
        ("stopped", ["■ stopped", "r resumes from the last checkpoint"]),
        ("failed", ["✗ failed", "r tries again", "nothing to train on"]),
        ("oom", ["▲ oom", "o opens the out-of-memory report"]),
        ("stale", ["? stale", "r resumes from the last checkpoint", "the engine ended without recording a reason"]),
        ("queued", ["○ queued", "waiting in the queue"]),
    ],
)
async def test_a_run_that_does_not_run_says_what_can_be_done(
    console: Opener, runs: Path, status: str, words: list[str]
) -> None:
    make_run(runs, status=status, error="nothing to train on" if status == "failed" else None)
    async with console() as pilot:
        await open_run(pilot)
        await pilot.sees(*words)


async def test_a_run_that_diverged_is_not_told_to_try_the_same_again(console: Opener, runs: Path) -> None:
    make_run(runs, status="failed", error="the gradients of step 3 are not finite")
    async with console() as pilot:
        await open_run(pilot)
        await pilot.sees("✗ failed", "n opens Launch to change its settings")


async def test_a_key_that_can_do_nothing_says_why(console: Opener, runs: Path) -> None:
    make_run(runs, status="paused")
    async with console() as pilot:
        await open_run(pilot)
        await pilot.press("p")
        await pilot.sees("the run is paused: no engine is running")


async def test_a_run_on_gpus_has_a_pane_with_their_graphs(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    gpu = {"used_bytes": 3 << 30, "utilisation_percent": 97, "temperature_celsius": 61, "power_watts": 300}
    async with console(120, 36) as pilot:
        await open_run(pilot)
        assert "gpus" not in shown_panes(pilot)
        add(run, lambda writer: [writer.write("gpu", index=index, **gpu) for index in (0, 1)])
        await pilot.sees(" gpus ", "heat to 100 °C", "GPU 1", "97 %")
        await pilot.textual_pilot.resize_terminal(80, 24)
        await pilot.press("shift+tab")
        await pilot.sees("GPU 0", "97 %", "300 W", "tab: next")


async def test_a_filter_lets_through_events_and_log_lines_with_all_its_words(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    add(run, lambda writer: writer.write("warning", code="w", text="the disk is slow", fix=""))
    run.log.write_text("the disk is slow\nloading the model\n")
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.sees("redone with at most 25", "loading the model")
        await pilot.press("slash", *"SLOW disk")
        await pilot.sees("/slow disk  1 of", "/slow disk  1 of 2")
        assert "redone with" not in pilot.text
        assert "loading the model" not in pilot.text
        await pilot.press("enter", "tab", "z")
        assert shown_panes(pilot) == ["log"], "the letters are keys again after Enter"
        await pilot.press("escape")
        await pilot.sees("tokens/s", "/slow disk  1 of 2")
        await pilot.press("escape")
        await pilot.sees("redone with at most 25", "loading the model")


async def test_a_key_narrows_events_to_problems_and_the_log_to_errors(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    run.log.write_text("loading the model\nRuntimeError: no\nWARNING odd\n")
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.sees("evaluation: loss", "loading the model")
        await pilot.press("F")
        await pilot.sees("events: problems, 1 of ", "; F: next kind", " problems  1 of ")
        assert "evaluation: loss" not in pilot.text
        await pilot.press("tab", "F", "F")
        await pilot.sees("engine log: errors, 1 of 3", "RuntimeError: no")
        assert "loading the model" not in pilot.text
        await pilot.press("escape")
        await pilot.sees("evaluation: loss", "loading the model")


async def test_scrolled_back_in_the_log_the_same_lines_stay_while_it_grows(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    run.log.write_text("".join(f"line {number:03}\n" for number in range(100)))
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.press("tab", "z")
        await pilot.sees("line 099")
        await pilot.press("pageup")
        await pilot.sees("line 050", "more below")
        before = [line for line in pilot.text.splitlines() if line.startswith(" line ")]
        with run.log.open("a") as file:
            file.writelines(f"line {number:03}\n" for number in range(100, 150))
            file.write("50 %")
        pilot.screen.poll()
        await pilot.textual_pilot.pause()
        assert [line for line in pilot.text.splitlines() if line.startswith(" line ")] == before
        await pilot.press("end")
        await pilot.sees("line 149", "50 %")


async def test_text_from_a_run_is_never_markup_and_never_moves_the_cursor(console: Opener, runs: Path) -> None:
    run = make_run(runs, model="[bold red]evil[/]")
    add(run, lambda writer: writer.write("warning", code="x", text="[link=file:///]click\x1b[2J\x1b[H[/link]", fix=""))
    run.log.write_text("[blink]log\x1b[2J\n")
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.sees("[link=file:///]click", "[/link]", "[blink]log")
        assert "\x1b" not in pilot.text


async def test_an_ended_run_is_not_painted_again_and_the_list_behind_it_polls_nothing(
    console: Opener, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    painted: list[object] = []
    display = TunedeckApp._display

    def noting(app: TunedeckApp, screen: Any, update: Any) -> None:
        painted.append(update)
        display(app, screen, update)

    make_run(runs)
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.sees("tokens/s", "≤25 × 2, batch 64")
        await pilot.until(lambda: pilot.screen._plotted[0][0] == pilot.screen.run_watch.version, "the curve")
        behind: Any = pilot.app.get_screen("runs")
        assert behind._poll_timer is None
        monkeypatch.setattr(TunedeckApp, "_display", noting)
        for _ in range(3):
            pilot.screen.poll()
            await pilot.textual_pilot.pause()
        assert [update for update in painted if update is not None] == []
        await pilot.press("escape")
        assert behind._poll_timer is not None


async def test_steps_alone_are_painted_at_intervals_and_what_else_happens_at_once(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.sees("step 30 of 100")
        pilot.screen._painted = (pilot.screen.status, float("inf"))
        add(run, lambda writer: writer.write("step", **step_fields(31)))
        await pilot.until(lambda: pilot.screen.run_watch.step == 31, "the step is read")
        pilot.screen.poll()
        assert "step 30 of 100" in pilot.text
        add(run, lambda writer: writer.write("warning", code="w", text="the disk is slow", fix=""))
        await pilot.sees("step 31 of 100", "the disk is slow")


async def test_a_run_folder_that_vanishes_leaves_the_console_up(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    async with console() as pilot:
        await open_run(pilot)
        shutil.rmtree(run.path)
        await pilot.sees("the run's folder was removed", "step 30 of 100")
        await pilot.press("escape")
        await pilot.sees("no runs in")


async def test_a_flood_of_events_and_log_lines_leaves_the_keys_alive(console: Opener, runs: Path) -> None:
    run = make_run(runs, status="queued")
    async with console(120, 36) as pilot:
        await open_run(pilot)
        with EventWriter(run) as writer, run.log.open("w") as log:
            writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
            for step in range(1, 20_001):
                writer.write("step", **step_fields(step))
                log.write(f"line {step}\n")
                if step % 100 == 0:
                    writer.write("backoff", **backoff_fields(step))
        await pilot.press("L")
        await pilot.sees("log  ", "line 20000", "step 20,000")


async def test_a_storm_of_resizes_leaves_everything_in_its_place(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(120, 36) as pilot:
        await open_run(pilot)
        for width in (20, 200, 79, 80, 1, 120, 60):
            for height in (5, 50, 23, 24, 1, 36):
                await pilot.textual_pilot.resize_terminal(width, height)
        await pilot.textual_pilot.resize_terminal(120, 36)
        await pilot.sees("✓ done", "tokens/s", "redone with at most 25", "activations")


async def test_every_new_pane_survives_resizes_torn_lines_a_flood_and_a_deleted_folder(
    console: Opener, runs: Path
) -> None:
    run = make_run(runs)
    gpu = {"used_bytes": 3 << 30, "utilisation_percent": 97, "temperature_celsius": 61, "power_watts": None}
    async with console(120, 36) as pilot:
        await open_run(pilot)
        add(run, lambda writer: [writer.write("gpu", index=index, **gpu) for index in range(9)])
        await pilot.sees("and 6 more: tab to this pane")
        await pilot.press("left", "F", "M")
        await pilot.sees(" evaluation loss  0.25", "problems")
        with run.events.open("ab") as file:
            file.write(
                b'{"seq":1,"time":"x","kind":"gpu","index":"none"}\n{"kind":"gpu","index":0,"used_bytes":"many"}\n'
            )
            file.write(b'{"seq":2,"time":"","kind":"step","step":31,"loss":null}\n\x00\x00\n{"seq":3,"kind":"gp')
        with run.log.open("wb") as log:
            log.write(b"\x1b[31merror\r" * 5000 + b"\xff\xfe\n" + b"line\n" * 20_000)
        for width, height in ((20, 5), (200, 50), (1, 1), (80, 24), (110, 32)):
            await pilot.textual_pilot.resize_terminal(width, height)
            await pilot.press("tab", "z", "F", "z")
        await pilot.press("M", "left", "shift+left", "right")
        shutil.rmtree(run.path)
        await pilot.sees("the run's folder was removed")
        await pilot.press("v", "M", "e", "y", "escape", "tab", "F")
        assert pilot.screen.screen_name == "run"


async def test_a_clone_is_what_the_run_was_started_with(runs: Path) -> None:
    from tui.run.reuse import launch_settings

    run = make_run(runs)
    assert launch_settings(run) == {"profile": "demo", "recipe": "demo", "overrides": ["train.max_steps=100"]}
    assert launch_settings(RunDirectory(runs / "nowhere")) == {"profile": "", "recipe": "", "overrides": []}


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_the_chain_stands_above_and_brackets_look_into_other_stages(
    console: Opener, runs: Path, width: int, height: int
) -> None:
    run = make_staged_run(runs, done=2)
    async with console(width, height) as pilot:
        await open_run(pilot)
        await pilot.sees(" mixture ", "step 20 of 40")
        await pilot.press("right_square_bracket")
        await pilot.sees("stage router has not started")
        await pilot.press("left_square_bracket")
        await pilot.sees(" expert-qmsum  done", "finished; result in ", "/model")
        assert pilot.screen.run_watch.directory.name == "02-expert-qmsum"
        assert pilot.screen.directory == run, "requests go to the run as a whole"
        assert pilot.screen.run_watch.latest["loss"] == 2.2
        await pilot.press("left_square_bracket", "left_square_bracket")
        await pilot.sees("expert-truthfulqa is the first stage")
        await pilot.press("right_square_bracket", "right_square_bracket")
        assert pilot.screen.looked_at == "mixture"
        add(run, lambda writer: writer.write("stage_started", name="router", number=4, of=5, path="stages/04-router",
                                             from_start=True))  # fmt: skip
        await pilot.until(lambda: pilot.screen.looked_at == "router", "the next stage, which is followed")


async def test_a_run_without_stages_has_no_chain(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(80, 24) as pilot:
        await open_run(pilot)
        await pilot.press("right_square_bracket")
        await pilot.sees("this run has no stages")
        assert not pilot.screen.query_one("#chain").display


SHARES = [0.24, 0.22, 0.01, 0.13, 0.1, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 36)])
async def test_a_mixture_has_a_bar_for_each_expert(console: Opener, runs: Path, width: int, height: int) -> None:
    use = {"mean": SHARES, "least": 0.0, "most": 0.4, "entropy": 0.41, "layer": 3}
    add(make_run(runs), lambda writer: writer.write("step", **step_fields(31, expert_utilisation=use, aux_loss=2.34)))
    async with console(width, height) as pilot:
        await open_run(pilot)
        await pilot.press(*(["shift+tab"] if height < 32 else []))
        await pilot.sees("0.03226, aux 2.34", "experts, even", "██▁▅▄▄▄▄  41 %")


async def test_many_experts_share_bars(console: Opener, runs: Path) -> None:
    use = {"mean": [0.0] * 65 + [1 / 63] * 63, "least": 0.0, "most": 0.02, "entropy": 0.86, "layer": 0}
    add(make_run(runs), lambda writer: writer.write("step", **step_fields(31, expert_utilisation=use)))
    async with console(80, 24) as pilot:
        await open_run(pilot)
        await pilot.press("shift+tab")
        await pilot.sees("▁" * 5 + "█" * 5, "86 %")
