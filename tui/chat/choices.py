"""What the Chat screen offers before a chat is open: chats that were left, and runs that can be talked to."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from textual.content import Content

from engine.errors import UsageError
from engine.journal.chats import list_chats, read_chat
from engine.journal.checkpoints_on_disk import find_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.journal.index import list_runs
from engine.journal.stages import result_run

MOST_CHATS, MOST_RUNS = 8, 40
"""The newest ones are offered."""


class ChatTargets(NamedTuple):
    """Models to talk to, side by side, as `tunedeck chat` takes them."""

    names: tuple[str, ...]
    recipe: str = ""
    """With a model that is no run: the path of the recipe whose settings count."""


class Choice(NamedTuple):
    """One row: a chat to go on with, or models to begin one with."""

    line: Content
    opens: RunDirectory | ChatTargets


def choices(runs_dir: Path) -> list[Choice]:
    """Chats first, then runs with weights; newest first."""
    return [*_chats(runs_dir), *_runs(runs_dir)]


def _chats(runs_dir: Path) -> list[Choice]:
    found = []
    for directory in list_chats(runs_dir)[:MOST_CHATS]:
        try:
            state = read_chat(directory)
        except OSError:
            continue
        if not state.models:
            continue
        last = state.exchanges[-1].question if state.exchanges else ""
        names = ", ".join(map(clean, state.models))
        style = "$good" if state.status != "ended" else "$muted"
        line = Content.assemble((f" {state.status:<10}", style), names, (f"  {clean(last)}", "$muted"))
        found.append(Choice(line, directory))
    return found


def _runs(runs_dir: Path) -> list[Choice]:
    found = []
    for run in list_runs(runs_dir)[:MOST_RUNS]:
        if has_weights(run):
            found.append(Choice(Content(f" {'run':<10}{clean(run.name)}"), ChatTargets((run.name,))))
    return found


def has_weights(run: RunDirectory) -> bool:
    """Whether there is a result or a checkpoint to talk to."""
    try:
        place = result_run(run) if run.exists() else run
    except UsageError:  # the stage whose result is the run's has not begun
        return False
    return place.adapter.is_dir() or place.model.is_dir() or bool(find_checkpoints(place.checkpoints))
