"""Fixes of processes that end in a way nobody foresaw: an error that is none of ours, and a chat that was killed."""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from engine.commands.chat_terminal import Talk
from engine.errors import EnvironmentProblem
from engine.journal.chats import is_answering
from engine.journal.liveness import running_engine
from engine.launch.other_processes import begin_chat
from engine.launch.process import force_stop
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe
from tests.fixes.conftest import Given
from tests.fixes.rows import text_of, was_given
from tests.journal.waiting import until
from tests.present import present

WALKED = ("commands/chat_terminal:_ended", "train/run/main:_describe: the traceback")
"""The fix texts that the tests below execute."""

BROKEN = """import sys

class Broken:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "engine.data.dataset_files":
            raise ZeroDivisionError("as a defect would")

sys.meta_path.insert(0, Broken)
"""
"""Runs at the start of each Python whose path has its folder: reading the data raises an error that is none of ours."""


def test_the_log_that_an_unexpected_error_names_has_its_traceback(
    tunedeck: Tunedeck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_interpreters: None
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    refused = tunedeck("train", "-p", write_profile(tmp_path), "-r", write_recipe(tmp_path))
    assert refused.code == 1
    assert "unexpected ZeroDivisionError: as a defect would" in refused.err, refused.err
    command = shlex.split(refused.err.partition("the traceback is in the run's log: tunedeck ")[2].splitlines()[0])
    told = tunedeck(*command)
    assert told.code == 0 and "Traceback (most recent call last)" in told.out and "ZeroDivisionError" in told.out


def test_a_chat_whose_process_was_killed_goes_on_by_the_command_it_names(
    tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir(exist_ok=True)
    chat = begin_chat(runs, {"targets": ["builtin:tiny"], "recipe": None, "runs": str(runs), "profile": "demo"})
    try:
        talk = Talk(chat)
        talk.wait_until_ready()
        os.kill(present(running_engine(chat)).pid, signal.SIGKILL)
        until(lambda: not is_answering(chat))
        with pytest.raises(EnvironmentProblem, match="the process of the chat has ended") as refused:
            talk.respond("hello")
        assert was_given(text_of("commands/chat_terminal:_ended"), given), given
        words = shlex.split(refused.value.fix.partition("tunedeck ")[2])
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/quit\n"))
        answer = tunedeck(*words, "--runs", str(runs))
        assert answer.code == 0, answer.err
        kinds = chat.events.read_text("utf-8")
        assert kinds.count('"chat_started"') == 2 and '"chat_answer"' in kinds
        until(lambda: not is_answering(chat))
    finally:
        force_stop(chat)
