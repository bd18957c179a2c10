"""Run directories and child engines for the tests of the journal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from tests.journal.run_directories import new_run

CHILD = Path(__file__).with_name("child_engine.py")

Spawn = Callable[[RunDirectory, str], "subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a temporary state folder, so that no test records its runs in the user's."""
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("TUNEDECK_RUNS", raising=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path / "runs")


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """A function that starts child engines as `start_engine` does; they are killed when the test ends."""
    children: list[subprocess.Popen[bytes]] = []

    def start(directory: RunDirectory, mode: str) -> subprocess.Popen[bytes]:
        with directory.log.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, str(CHILD), str(directory.path), mode],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
