"""Three consoles, two workers and two followers on one queue: everything is suspended and goes on; two consoles ask at
once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from engine.journal.index import list_runs
from engine.journal.liveness import engine_process
from engine.journal.queue import Queue
from engine.journal.summary import summarise
from engine.launch.process import ENTRY_FILE, force_stop
from tests.cli.small_recipes import write_profile, write_recipe
from tests.events import read_events
from tests.tui.tmux_terminal import Terminal, needs_tmux, until

STOPPED_SECONDS = float(os.environ.get("TUNEDECK_STOPPED_SECONDS", "6"))
"""Longer than the pause between two heartbeats, after which an engine says nothing."""

pytestmark = needs_tmux


@pytest.fixture
def consoles(runs: Path, tmp_path: Path) -> Iterator[list[Terminal]]:
    """Three on one runs folder."""
    with ExitStack() as stack:
        three = [Terminal(runs, tmp_path / f"tmux-{number}") for number in range(3)]
        for console in three:
            stack.callback(console.close)
        yield three
    for run in list_runs(runs):
        force_stop(run)


def queued(runs: Path, folder: Path, *names: str) -> list[RunDirectory]:
    """Runs of 3,000 steps, which are equal, in the queue."""
    recipe = write_recipe(folder, ("max_steps = 2", "max_steps = 3000"), ("every_steps = 1", "every_steps = 500"),
                          ("micro_batch = 2\n", "micro_batch = 2\nseed = 3\n"))  # fmt: skip
    words = [sys.executable, "-P", str(ENTRY_FILE), "queue", "add", "-p", str(write_profile(folder)), "-r", str(recipe)]
    for name in names:
        subprocess.run([*words, "--runs", str(runs), "--name", name], check=True, capture_output=True)
    return [RunDirectory(next(runs.glob(f"*-{name}"))) for name in names]


def start_queue(runs: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-P", str(ENTRY_FILE), "queue", "start", "--runs", str(runs)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def sees_done(console: Terminal, runs: int) -> None:
    until(lambda: console.text.count("done") == runs, lambda: console.text)


def losses(run: RunDirectory) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in read_events(run.events) if event["kind"] == "step"]


def test_everything_that_was_suspended_goes_on(consoles: list[Terminal], runs: Path, tmp_path: Path) -> None:
    one, two = queued(runs, tmp_path, "one", "two")
    for console in consoles:
        console.open_console()
        console.sees("queued   one", "queued   two")
    starters = [start_queue(runs), start_queue(runs)]
    until(lambda: summarise(one).step > 100, lambda: f"steps of {summarise(one)}")
    for console in consoles:
        console.sees("running")
    worker, engine = Queue(runs).read().worker, engine_process(one)
    assert worker is not None and engine is not None
    pids = [worker.pid, engine.pid, *(each.pid for each in starters), *(each.console_pid for each in consoles)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_SECONDS)
    assert (summarise(one).status, summarise(one).phase) == ("running", "suspended by a signal")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    told = [each.communicate() for each in starters]
    assert {each.returncode for each in starters} <= {0, 6} and 0 in [each.returncode for each in starters], told
    for console in consoles:
        sees_done(console, 2)
        console.press("q")
    for run in (one, two):
        kinds = [event["kind"] for event in read_events(run.events)]
        assert (kinds.count("run_started"), kinds.count("run_finished"), summarise(run).status) == (1, 1, "done")
    assert losses(one) == losses(two) and len(losses(one)) == 3000


def test_of_three_consoles_two_pause_the_run_at_once(consoles: list[Terminal], runs: Path, tmp_path: Path) -> None:
    (run,) = queued(runs, tmp_path, "one")
    for console in consoles:
        console.open_console()
        console.sees(run.name)
        console.press("Enter")
        console.sees("waiting in the queue")
    starter = start_queue(runs)
    for console in consoles:
        console.sees("● running", "loss")
    for console in consoles[:2]:
        console.press("p")
    starter.communicate()
    for console in consoles:
        console.sees("paused")
    summary = summarise(run)
    assert (summary.status, summary.checkpoints[-1], summary.samples_lost) == ("paused", summary.step, 0)
    consoles[2].press("r")
    until(lambda: summarise(run).status == "done", lambda: f"the end of {summarise(run)}")
    for console in consoles:
        console.sees("✓ done")
    assert [step for step, _ in losses(run)] == list(range(1, 3001))
