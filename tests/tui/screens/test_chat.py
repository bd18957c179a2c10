"""The Chat screen with a real process: answers, sampling keys, pairs, files, a killed process, and the list."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from engine.journal.chats import list_chats
from engine.journal.liveness import running_engine
from tests.present import present
from tests.tui.conftest import Opener
from tui.chat.choices import ChatTargets

RECIPE = """schema = 1
kind = "recipe"
[model]
id = "builtin:tiny"
[[data.sources]]
name = "rows"
path = "rows.jsonl"
format = "chat"
[generate]
max_new_tokens = 6
[train]
max_steps = 1
"""


@pytest.mark.asyncio
async def test_a_model_is_asked_answers_are_rated_saved_and_taken_up_after_a_kill(
    console: Opener, runs: Path, empty_folder: Path
) -> None:
    (empty_folder / "tiny.toml").write_text(RECIPE)
    async with console(100, 30) as seen:
        seen.app.open_screen("chat", ChatTargets(("builtin:tiny",), recipe=str(empty_folder / "tiny.toml")))
        await seen.until(lambda: seen.screen.screen_name == "chat")
        await seen.press(*"hello", "space", "enter")  # as plain text may end
        await seen.sees("> hello", "builtin:tiny", "enter send  esc keys")
        await seen.until(lambda: seen.screen.state.status == "ready" and seen.screen.state.exchanges, "an answer")
        await seen.press("escape", *["greater_than_sign"] * 15, "N", "R")
        await seen.until(lambda: seen.screen.state.exchanges[0].earlier and seen.screen.state.status == "ready")
        await seen.sees("temperature 1.5", "seed 1", "answer 2")
        await seen.press("minus")
        (pair,) = [json.loads(line) for line in Path("preferences.jsonl").read_text("utf-8").splitlines()]
        assert pair["prompt"] == [{"role": "user", "content": "hello "}] and pair["chosen"] != pair["rejected"]
        assert pair["rejected"][0]["content"] == seen.screen.state.exchanges[0].replies["builtin:tiny"].text
        await seen.press("k")
        await seen.sees("the rendered prompt", "least likely", "<user>hello <end><assistant>")
        assert "enter type" in seen.text and "enter send" not in seen.text
        await seen.press("k", "w", "enter")
        assert json.loads(Path("conversations.jsonl").read_text("utf-8"))["messages"][0]["content"] == "hello "
        await seen.press("b")
        await seen.sees("the base is not available in this chat")
        (chat,) = list_chats(runs)
        os.kill(present(running_engine(chat)).pid, signal.SIGKILL)
        await seen.sees("a question restarts it with the conversation")
        await seen.press("enter", *"more", "enter")
        await seen.until(lambda: len(seen.screen.state.exchanges) == 2 and seen.screen.state.status == "ready")
        assert "hello" in seen.screen.state.exchanges[1].replies["builtin:tiny"].prompt
        await seen.press("ctrl+c")
        await seen.until(lambda: running_engine(chat) is None, "the end of the process")
        await seen.sees("ended     builtin:tiny")


@pytest.mark.asyncio
async def test_a_model_that_is_not_there_says_so(console: Opener, runs: Path) -> None:
    async with console(100, 30) as seen:
        await seen.press("7")
        await seen.sees("no run has a result or a checkpoint yet", "A in the Library (3)", "enter open  ? help")
        await seen.press("b")
        await seen.sees("no chat is open")
        seen.app.open_screen("chat", ChatTargets(("nothing-here",)))
        await seen.sees("nothing-here", "a question restarts it with the conversation", "fix:")
