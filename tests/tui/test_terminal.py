"""What the console tells the terminal beside its picture, and which ends of runs it tells."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from engine.journal.summary import summarise
from engine.launch.process import ENTRY_FILE
from tests.tui.conftest import Spawn
from tests.tui.recorded_runs import make_run
from tests.tui.tmux_terminal import until
from tui.run.engine_processes import running_runs
from tui.run.run_ends import RunEnds
from tui.terminal import HANGUP_CODE, RESTORE_TITLE, SAVE_TITLE, Terminal


def test_a_title_is_written_when_it_changes_and_put_back_at_the_end() -> None:
    written: list[str] = []
    terminal = Terminal(written.append, {})
    for title in ("running 2.1 a", "running 2.1 a", "done\x1b]2;evil\x07"):
        terminal.set_title(title)
    terminal.restore_title()
    terminal.restore_title()
    save, first, second, restore = written
    assert (save, first, restore) == (SAVE_TITLE, "\x1b]2;running 2.1 a\x07", RESTORE_TITLE)
    assert second.count("\x1b") == 1 and second.count("\x07") == 1, "text of a run never ends a sequence"


@pytest.mark.parametrize(
    ("environment", "written"),
    [
        ({}, "\x1b]9;Tunedeck: demo: done\x07\x07"),
        ({"TMUX": "/tmp/a"}, "\x1bPtmux;\x1b\x1b]9;Tunedeck: demo: done\x07\x1b\\\x07"),
    ],
)
def test_a_notification_rings_and_passes_through_tmux(environment: dict[str, str], written: str) -> None:
    found: list[str] = []
    Terminal(found.append, environment).notify("demo: done")
    assert "".join(found) == written


def test_the_end_of_a_run_is_told_once_and_that_of_older_runs_never(runs: Path, spawn: Spawn) -> None:
    make_run(runs, "older", status="failed")
    run = make_run(runs, status="queued")
    ends = RunEnds(runs)
    assert ends.poll() == []
    engine = spawn(run, "obey")
    until(lambda: running_runs(runs) == [run.name] and summarise(run).step > 0, lambda: "an engine that trains")
    assert ends.poll() == []
    engine.kill()
    engine.wait()
    told: list[str] = []

    def is_told() -> bool:
        told.extend(ends.poll())
        return bool(told)

    until(is_told, lambda: f"the end of {summarise(run)}")
    assert told == [f"{run.name}: its engine has ended"], "a name that other runs have, too, could be the one in front"
    assert ends.poll() == []


def test_a_console_that_lost_its_terminal_ends_though_hup_is_ignored(runs: Path) -> None:
    master, slave = pty.openpty()
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    console = subprocess.Popen(
        [sys.executable, "-c", ignoring, sys.executable, "-P", str(ENTRY_FILE), "--runs", str(runs)],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    try:
        seen = b""
        while b"\x1b[?1049h" not in seen:  # it has taken the screen
            seen += os.read(master, 65536)
        os.close(master)
        assert console.wait(60) == HANGUP_CODE
    finally:
        console.kill()
        console.wait()
