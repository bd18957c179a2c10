"""The console as a user sees it: in a real terminal (tmux), with a real engine, controlled by keys alone.

The first test shows a run that outlives its console. The second presses the keys of the loop in docs/console.md: a run
is started, paused, left, stopped, resumed and compared. The third controls a staged run from Launch to its end; the
console is killed in the middle.
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
    found = re.search(r"^ loss (\d+\.\d+)", screen, re.MULTILINE)
    assert found, screen
    return float(found[1])


def test_a_run_outlives_its_console(terminal: Terminal, runs: Path, recipe: Path) -> None:
    terminal.open_console("-p", "demo", "-r", str(recipe))
    terminal.sees("Launch", "fits with micro-batch 17")
    terminal.press("s")
    terminal.sees("out of memory in", "1 time, survived")
    (demo,) = list_runs(runs)
    reached(demo, 10)
    first = loss_on(terminal.sees(" loss ", "batch 64"))
    reached(demo, 30)
    until(lambda: loss_on(terminal.text) < 0.9 * first, lambda: "a falling loss")

    os.kill(terminal.console_pid, signal.SIGKILL)
    step = summarise(demo).step
    assert reached(demo, step + 5).status == "running"

    terminal.open_console()
    terminal.sees("● running", demo.name)
    terminal.press("Enter")
    terminal.sees("● running", "out of memory in")
    terminal.sees("✓ done", "step 120 of 120")
    terminal.press("q")
    summary = summarise(demo)
    assert (summary.status, summary.samples_lost, summary.damaged_lines) == ("done", 0, 0)


def keys_of_the_loop() -> list[str]:
    """The keys of the loop, as docs/console.md lists them."""
    text = (ROOT / "docs" / "console.md").read_text("utf-8").partition("## The whole loop in 20 keys")[2]
    return re.findall(r"^\| `([^`]+)` \|", text.partition("\n## ")[0], re.MULTILINE)


SEEN_AFTER = (
    ("R", "with their verdicts on demo"), ("escape", "Settings"), ("a", "✓ fits"), ("s", "● running"),
    ("w", "checkpoint saved"),
    ("p", "‖ paused"), ("r", "resumed after step"), ("q", ""), ("enter", "gradient norm"), ("x", "Stop this run"),
    ("y", "■ stopped"), ("r", "● running"), ("n", "s starts"), ("s", "Run"), ("1", "1 Runs"), ("g", "● running"),
    ("space", "1 marked"), ("space", "2 marked"), ("c", "evaluation while training"), ("q", ""),
)  # fmt: skip
"""The keys of the loop, and what each brings to the screen."""

LONGER = (("max_steps = 300", "max_steps = 20000"), *SHORTER[1:])
"""Replacements in the demo's recipe that make its run outlast the loop."""


def wait_for_steps(runs: Path, number: int) -> None:
    """Wait until there are this many runs, and the newest has done some steps."""
    until(lambda: len(list_runs(runs)) == number, lambda: f"run {number}: {list_runs(runs)}")
    newest = list_runs(runs)[0]
    until(lambda: summarise(newest).step >= 3, lambda: f"steps: {summarise(newest)}")


def test_the_whole_loop_takes_the_keys_that_the_docs_list(terminal: Terminal, runs: Path, tmp_path: Path) -> None:
    text = (ROOT / "profiles" / "recipes" / "demo.toml").read_text("utf-8")
    for before, after in LONGER:
        text = text.replace(before, after)
    recipe = tmp_path / "demo.toml"
    recipe.write_text(text, "utf-8")
    assert [key for key, _ in SEEN_AFTER] == keys_of_the_loop()
    assert len(SEEN_AFTER) <= 25
    started = 0
    try:
        terminal.open_console("-p", "demo", "-r", str(recipe))
        terminal.sees("Launch", "fits with micro-batch 17")
        for key, seen in SEEN_AFTER:
            terminal.press({"enter": "Enter", "space": "Space", "escape": "Escape"}.get(key, key))
            if key == "q":
                until(lambda: not terminal.is_open, lambda: terminal.text)
            else:
                terminal.sees(seen)
            if key == "q" and started == 1:
                terminal.open_console()
                terminal.sees("● running")
            if key == "s":
                started += 1
                wait_for_steps(runs, started)
        assert {summarise(run).samples_lost for run in list_runs(runs)} == {0}
    finally:
        for run in list_runs(runs):
            force_stop(run)


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
    for key in ("j", "j", "j", "Space"):
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
    screen = terminal.sees(
        "✓ expert done", "✓ mixture done", "router  done", "finished; result in ", "/stages/03-router/model"
    )
    assert "full" not in screen.replace("at full length", "")
    terminal.press("[")
    terminal.press("[")
    terminal.sees(f"{run.name}/expert", "step 2 of 2")
    terminal.press("q")
    assert [(stage["name"], stage["status"]) for stage in summarise(run).stages] == [
        ("expert", "done"), ("mixture", "done"), ("router", "done"),
    ]  # fmt: skip
