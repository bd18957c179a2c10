"""The chain of a staged run on one line, at any width."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from tests.tui.recorded_runs import make_run
from tests.tui.recorded_stages import NAMES, make_staged_run
from tui.run.chain import Link, chain_line, chain_of
from tui.run.watch import RunWatch

STATES = ("done", "failed", "skipped", "pending", "pending")
CHAIN = [Link(name, state) for name, state in zip(NAMES, STATES, strict=True)]


def watch(run: RunDirectory) -> RunWatch:
    found = RunWatch(run)
    found.read_more(seconds=60.0)
    return found


def test_the_chain_has_what_is_done_running_skipped_and_to_come(tmp_path: Path) -> None:
    chain = chain_of(watch(make_staged_run(tmp_path, done=2, skipped=("full",))))
    assert [link.name for link in chain] == list(NAMES)
    assert [link.state for link in chain][:2] == ["done", "done"]
    assert [link.state for link in chain][3:] == ["pending", "skipped"]
    assert chain_of(watch(make_run(tmp_path, "plain"))) == []


@pytest.mark.parametrize("width", [140, 80, 40, 20])
@pytest.mark.parametrize("looked_at", NAMES)
def test_the_stage_that_is_looked_at_is_always_in_sight_with_its_state(width: int, looked_at: str) -> None:
    line = chain_line(CHAIN, looked_at, width, ascii_only=False)
    state = next(link.state for link in CHAIN if link.name == looked_at)
    if width >= 40:
        assert line.cell_length <= width
    assert f" {looked_at}  {state}" in line.plain
    assert chain_line(CHAIN, looked_at, width, ascii_only=True).plain.isascii()


def test_with_room_every_state_has_its_word_and_glyph() -> None:
    line = chain_line(CHAIN, "mixture", 140, ascii_only=False).plain
    assert "✓ expert-truthfulqa done → ✗ expert-qmsum failed → ─  mixture  skipped → · router pending" in line
