"""A chat as a user has it, in a real terminal by keys alone: while the demo trains and after, two checkpoints side by
side, saved, and trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.journal.chats import is_answering, list_chats
from engine.journal.control import send_request
from engine.journal.index import list_runs
from engine.journal.summary import summarise
from engine.launch.process import force_stop
from tests.tui.tmux_terminal import ROOT, Terminal, needs_tmux, until

pytestmark = needs_tmux

SHORTER = (('split = "train"', 'split = "train"\nlimit = 4000'),
           ("at_start = true", "at_start = false\nlimit = 32"), ('["loss", "exact_match"]', '["loss"]'),
           ("[checkpoint]\nevery_steps = 50", "[checkpoint]\nevery_steps = 5"))  # fmt: skip
"""Replacements in the demo's recipe: less to read, nothing to generate, and a checkpoint soon."""

ON_SAVED = """schema = 1
kind = "recipe"
[model]
id = "builtin:tiny"
[[data.sources]]
name = "saved"
path = "conversations.jsonl"
[train]
max_steps = 2
batch_size = 2
"""


@pytest.fixture
def recipe(runs: Path, empty_folder: Path) -> Iterator[Path]:
    """The demo's recipe, quicker at its start. Its engine and chats are ended when the test ends."""
    text = (ROOT / "profiles" / "recipes" / "demo.toml").read_text("utf-8")
    for before, after in SHORTER:
        assert before in text, before
        text = text.replace(before, after)
    path = empty_folder / "demo.toml"
    path.write_text(text, "utf-8")
    yield path
    for process in [*list_runs(runs), *list_chats(runs)]:
        force_stop(process)


def ask(terminal: Terminal, question: str, *seen: str) -> None:
    for key in question:
        terminal.press("Space" if key == " " else key)
    terminal.press("Enter")
    terminal.sees(f"> {question}", "tokens/s", *seen)


def test_checkpoints_are_talked_to_while_the_demo_trains_and_what_was_said_is_trained_on(
    terminal: Terminal, runs: Path, recipe: Path
) -> None:
    terminal.open_console("-p", "demo", "-r", str(recipe), cwd=recipe.parent)
    terminal.sees("Launch", "fits with micro-batch 17")
    terminal.press("s")
    terminal.sees("● running")
    (demo,) = list_runs(runs)
    until(lambda: any(demo.checkpoints.glob("step-*")), lambda: f"a checkpoint: {summarise(demo)}")
    terminal.press("A")
    terminal.sees("ready", demo.name, "plain text as in the training data", "enter send")
    ask(terminal, "3 May 2021 ->")
    assert summarise(demo).status == "running"
    send_request(demo, "stop")
    until(lambda: summarise(demo).status == "stopped", lambda: f"the end: {summarise(demo)}")
    ask(terminal, "4 June 1999 ->")

    first, last = sorted(int(path.name.removeprefix("step-")) for path in demo.checkpoints.glob("step-*"))[-2:]
    terminal.press("Escape")
    terminal.sees("enter type", "M models")
    terminal.press("M")
    terminal.sees("models (RUN RUN@STEP RUN@best)")
    terminal.press("C-u")
    for key in f"last@{first} last@{last}":
        terminal.press("Space" if key == " " else key)
    terminal.press("Enter")
    terminal.sees("ready", f"last@{first}", f"last@{last}")
    ask(terminal, "5 July 2003 ->")
    terminal.press("Escape")
    terminal.sees("enter type")
    terminal.press("w")
    terminal.sees("append to")
    terminal.press("Enter")
    terminal.sees("2 saved to conversations.jsonl")
    rows = [json.loads(line) for line in (recipe.parent / "conversations.jsonl").read_text("utf-8").splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == ["5 July 2003 ->"] * 2
    terminal.press("x")
    terminal.sees("the chat has ended", "enter open")
    terminal.press("Enter")
    terminal.sees("a question restarts it with the conversation")
    ask(terminal, "6 June 2004 ->")
    assert any(map(is_answering, list_chats(runs)))
    terminal.press("Escape")
    terminal.sees("enter type")
    terminal.press("q")
    until(lambda: not terminal.is_open, lambda: terminal.text)
    until(lambda: not any(map(is_answering, list_chats(runs))), lambda: "a chat outlived the console that began it")

    (recipe.parent / "saved.toml").write_text(ON_SAVED, "utf-8")
    terminal.open_console("-p", "demo", "-r", "saved.toml", cwd=recipe.parent)
    terminal.sees("Launch", "✓ fits")
    terminal.press("s")
    terminal.sees("✓ done", "step 2 of 2")
    assert [summarise(run).samples_lost for run in list_runs(runs)] == [0, 0]
