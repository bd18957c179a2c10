"""The console as a user sees it: in a real terminal (tmux), with a real engine, controlled by keys alone.

The first test takes about a minute: a run is killed, paused, stopped and resumed, as it may happen to a run of several
days. The second controls a staged run from Launch to its end; the console is killed in the middle.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from engine.journal.index import list_runs
from engine.journal.summary import RunSummary, summarise
from engine.launch.process import force_stop
from tests.stages.staged_runs import write_tiny_model
from tests.tui.tmux_terminal import ROOT, Terminal, needs_tmux, until

SHORTER = (("max_steps = 300", "max_steps = 120"), ('split = "train"', 'split = "train"\nlimit = 4000'),
           ("at_start = true", "at_start = true\nlimit = 32"))  # fmt: skip
"""Replacements in the demo's recipe that make its run a third as long."""

pytestmark = needs_tmux


@pytest.fixture
def recipe(runs: Path, tmp_path: Path) -> Iterator[Path]:
    """The demo's recipe with fewer steps. Its engine is ended when the test ends."""
    text = (ROOT / "profiles" / "recipes" / "demo.toml").read_text("utf-8")
    for before, after in SHORTER:
        assert before in text
        text = text.replace(before, after)
    path = tmp_path / "demo.toml"
    path.write_text(text, "utf-8")
    yield path
    for run in list_runs(runs):
        force_stop(run)


def reached(run: RunDirectory, step: int) -> RunSummary:
    until(lambda: summarise(run).step >= step, lambda: f"step {step}: {summarise(run)}")
    return summarise(run)


def loss_on(screen: str) -> float:
    found = re.search(r"loss {11}(\d+\.\d+)", screen)
    assert found, screen
    return float(found[1])


def test_a_run_outlives_its_console_and_is_led_to_its_end_by_keys_alone(
    terminal: Terminal, runs: Path, recipe: Path
) -> None:
    terminal.open_console("-p", "demo", "-r", str(recipe))
    terminal.sees("Launch", "fits with micro-batch 17")
    terminal.press("s")
    terminal.sees("out of memory in", "1 time, survived")
    (demo,) = list_runs(runs)
    reached(demo, 10)
    first = loss_on(terminal.sees("loss   ", "batch 64"))
    reached(demo, 30)
    until(lambda: loss_on(terminal.text) < 0.9 * first, lambda: "a falling loss")

    os.kill(terminal.console_pid, signal.SIGKILL)
    step = summarise(demo).step
    assert reached(demo, step + 5).status == "running"

    terminal.open_console()
    terminal.sees("● running", demo.name)
    terminal.press("Enter")
    terminal.sees("● running", "out of memory in")
    terminal.press("p")
    terminal.sees("‖ paused", "r resumes it")
    paused_at = summarise(demo).step
    assert 0 < paused_at < 120

    terminal.press("r")
    terminal.sees("● running", f"resumed after step {paused_at}")
    reached(demo, paused_at + 5)
    terminal.press("x")
    terminal.sees("Stop this run after the present step")
    terminal.press("y")
    terminal.sees("■ stopped")

    terminal.press("r")
    terminal.sees("✓ done", "step 120 of 120")
    terminal.press("q")
    summary = summarise(demo)
    assert (summary.status, summary.samples_lost, summary.damaged_lines) == ("done", 0, 0)


STAGED = """schema = 1
kind = "recipe"
name = "small-merge"
[model]
id = "{model}"
dtype = "float32"
[method]
kind = "full"
[data]
max_length = 48
[[data.sources]]
name = "dates"
path = "builtin:dates"
limit = 64
[train]
max_steps = 2
batch_size = 4
[[stages]]
name = "expert"
method = {{ train_only = ["model.layers.*.mlp"] }}
[[stages]]
name = "mixture"
kind = "assemble"
from = ["expert", "base"]
[[stages]]
name = "router"
from = "mixture"
moe = {{ freeze_router = false }}
[[stages]]
name = "full"
from = "router"
moe = {{ freeze_router = false }}
"""


@pytest.fixture
def staged_recipe(runs: Path, tmp_path: Path) -> Iterator[Path]:
    """A recipe of four stages like expert-merge, with a tiny model. Its processes are ended when the test ends."""
    path = tmp_path / "small-merge.toml"
    path.write_text(STAGED.format(model=write_tiny_model(tmp_path / "base")), "utf-8")
    yield path
    for run in list_runs(runs):
        force_stop(run)


def test_a_staged_run_goes_from_launch_to_its_end_without_a_stage_and_while_the_console_is_killed(
    terminal: Terminal, runs: Path, staged_recipe: Path
) -> None:
    terminal.open_console("-p", "demo", "-r", str(staged_recipe))
    terminal.sees("1 expert", "4 full", "the bar shows")
    for key in ("g", "j", "j", "j", "Space"):
        terminal.press(key)
    terminal.sees("4 full", "off", "3 stages")
    terminal.press("s")
    terminal.sees("Run", "expert", "→", "router", "engine log")
    (run,) = list_runs(runs)

    os.kill(terminal.console_pid, signal.SIGKILL)
    until(lambda: len(summarise(run).stages) >= 2, lambda: f"the second stage: {summarise(run)}")
    terminal.open_console()
    terminal.sees(run.name)
    terminal.press("l")
    terminal.sees("└ expert", "└ mixture", "└ router")
    terminal.press("Enter")
    screen = terminal.sees("✓ expert done", "✓ mixture done", "router  done", "result in stages/03-router/model")
    assert "full" not in screen
    terminal.press("[")
    terminal.press("[")
    terminal.sees(f"{run.name}/expert", "step 2 of 2")
    terminal.press("q")
    assert [(stage["name"], stage["status"]) for stage in summarise(run).stages] == [
        ("expert", "done"), ("mixture", "done"), ("router", "done"),
    ]  # fmt: skip
