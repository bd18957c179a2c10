"""The command line as a user meets it: `tunedeck(...)` runs one command in this process, in an empty folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import cli
from tests.cli.outcome import Outcome

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
