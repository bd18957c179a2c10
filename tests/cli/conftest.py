"""The command line as a user meets it: `tunedeck(...)` runs one command in this process, in an empty folder."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import cli
from engine.journal.directory import RunDirectory
from engine.journal.liveness import identify, is_alive
from engine.journal.summary import summarise
from tests.cli.outcome import Outcome
from tests.journal.waiting import until

Tunedeck = Callable[..., Outcome]


@pytest.fixture
def tunedeck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Tunedeck]:
    """A function that runs one command with the given arguments, in the test's own empty folder, and returns its
    Outcome."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNEDECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "state"))

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tunedeck", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            cli.run()
        written = capsys.readouterr()
        return Outcome(int(ending.value.code or 0), written.out, written.err)

    yield call


LONG = ("--set", "train.max_steps=100000", "--set", "train.warmup_steps=0", "--set", "eval.every_steps=")


@pytest.fixture
def started(tunedeck: Tunedeck) -> Iterator[tuple[RunDirectory, int]]:
    """A run that takes steps, and the pid of its engine, which is killed when the test ends."""
    told = json.loads(tunedeck("train", "-p", "demo", "-r", "demo", *LONG, "--detach", "--json").out)
    engine = identify(told["pid"])
    run = RunDirectory(Path(told["path"]))
    try:
        until(lambda: summarise(run).step > 0)
        yield run, told["pid"]
    finally:
        if engine is not None and is_alive(engine):
            os.kill(engine.pid, signal.SIGKILL)
