"""The console when nothing can be written: it keeps running, shows runs and plans, and reports what it cannot write.

The limits are those of the operating system: a process that may not write a byte to any file, and folders without write
permission (root is deprived of its right to write there anyway).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.small_recipes import make_run as make_real_run
from tests.cli.small_recipes import write_recipe
from tests.tui.recorded_runs import add, make_run
from tests.tui.tmux_terminal import Terminal, needs_tmux

pytestmark = [needs_tmux, pytest.mark.skipif(shutil.which("prlimit") is None, reason="util-linux is not installed")]

FULL_DISK = ["prlimit", "--fsize=0"]
CAPABILITIES = "-dac_override,-dac_read_search,-fowner"
RIGHTLESS = ["setpriv", f"--bounding-set={CAPABILITIES}", f"--inh-caps={CAPABILITIES}"] if os.geteuid() == 0 else []


@pytest.fixture
def locked(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder in which nothing can be written, with the folders for state, configuration and cache; the runs
    folder is locked, too."""
    home = tmp_path / "home"
    for name in ("TUNEDECK_STATE", "TUNEDECK_CONFIG", "TUNEDECK_CACHE"):
        monkeypatch.setenv(name, str(home / name))
        (home / name).mkdir(parents=True)
    positions = [*runs.rglob("*"), runs, *home.iterdir(), home]
    modes = {place: place.stat().st_mode for place in positions}
    for place in positions:
        place.chmod(0o500 if place.is_dir() else 0o400)
    yield home
    for place in reversed(positions):
        place.chmod(modes[place])


def test_with_a_full_disk_it_says_what_it_cannot_write_and_stays(terminal: Terminal, tmp_path: Path) -> None:
    paused = make_real_run(tmp_path, write_recipe(tmp_path))
    started = {"run": paused.name, "pid": 1, "world_size": 1, "versions": {}}
    add(paused, lambda writer: writer.write("run_started", **started))
    add(paused, lambda writer: writer.write("run_finished", status="paused", exit_code=130, result=None))
    terminal.open_console("-p", "demo", "-r", "demo", under=FULL_DISK)
    terminal.sees("fits with micro-batch 17", "missing")
    terminal.press("s")
    terminal.sees("no run directory can be created", "fix: choose another folder with --runs")
    terminal.press("1")
    terminal.sees("paused", paused.name)
    terminal.press("Enter")
    terminal.sees("r resumes it")
    terminal.press("r")
    terminal.sees("the engine cannot be started: File too large")
    terminal.press("Escape")
    terminal.sees("paused", "1 Runs")


def test_in_a_read_only_home_runs_can_be_looked_at_and_plans_be_made(
    runs: Path, request: pytest.FixtureRequest
) -> None:
    done = make_run(runs, "kept", status="paused")
    home = request.getfixturevalue("locked")
    terminal: Terminal = request.getfixturevalue("terminal")
    terminal.open_console(under=RIGHTLESS, cwd=home)
    terminal.sees("paused", done.name)
    terminal.press("x")
    terminal.press("y")
    terminal.sees("cannot be moved", "Permission denied")
    terminal.press("2")
    terminal.sees("fits", "left")
    terminal.press("s")
    terminal.sees("no run directory can be created", "fix: choose another folder with --runs")


def test_it_outlives_the_folder_it_was_opened_in(terminal: Terminal, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    terminal.open_console("-p", "demo", "-r", "demo", cwd=folder)
    terminal.sees("fits with micro-batch 17", "missing")
    folder.rmdir()
    terminal.press("a")
    terminal.sees("✓ fits", "17 × 4 accumulated × 1 device")
