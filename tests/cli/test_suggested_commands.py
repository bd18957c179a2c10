"""Every command that a message names exists, takes the options that are written, and is complete.

The messages are found in the code itself: all strings of engine and console that name a command of tunedeck. What a
command then does in the state that suggests it is tried in test_fixes.py and test_first_hour.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from engine import cli

ROOT = Path(__file__).parents[2]

NAMED = re.compile(
    r"(?<![.\w])tunedeck(?! X)((?: (?:[a-z_]+|-{1,2}[a-z][a-z-]*|[A-Z.]{2,}|\d+|X[\w./=-]*|\[?[a-z]+[./=][\w./=]+))+)"
)
"""Words that a command line consists of; a value in an f-string is X."""

REST_IS_KNOWN = re.compile(r"[`,]? *(?:with )?(?:the )?same (?:arguments|-p)|, in a process| '")
"""What stands behind a command whose arguments are known, or go on in quotes."""

PROSE = {
    "wrote",
    "cannot",
    "shows",
    "is",
    "ended",
    "has",
    "exists",
    "writes",
    "command",
    "tokenises",
    "goes",
    "and",
    "with",
    "of",
    "after",
    "reads",
}
"""Words behind "tunedeck" or behind a command in sentences about it."""


def texts_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is no docstring, with X for each value in it."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (inside | docs):
            yield node.lineno, node.value


def suggestions() -> Iterator[tuple[str, str, str]]:
    """Place, words of the command, and what follows them."""
    for path in sorted([*ROOT.glob("engine/**/*.py"), *ROOT.glob("tui/**/*.py")]):
        for line, text in texts_of(ast.parse(path.read_text("utf-8"))):
            for found in NAMED.finditer(text):
                yield f"{path.relative_to(ROOT)}:{line}", found[1].strip(), text[found.end() :]


SUGGESTED = list(suggestions())


def resolved(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words begin with, and the other words."""
    command: Any = typer.main.get_command(cli.app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def wrong(words: str, rest: str) -> str:
    """What is wrong with a suggested command; empty if nothing is."""
    command, given = resolved(words.split())
    if hasattr(command, "commands"):
        return "" if not given or given[0] in (*PROSE, "--help") else f"no such command: {given[0]}"
    options = {name: each for each in command.params for name in each.opts if name.startswith("-")}
    places = [each for each in command.params if not each.opts[0].startswith("-")]
    values = 0
    while given and given[0] not in PROSE:
        word = given.pop(0)
        if not word.startswith("-"):
            values += 1
        elif word not in options:
            return f"no such option: {word}"
        elif not options[word].is_flag and not given and not REST_IS_KNOWN.match(rest):
            return f"{word} without a value"
        elif not options[word].is_flag and given:
            given.pop(0)
    said = given or REST_IS_KNOWN.match(rest) or rest.startswith("`")
    needed = sum(each.required for each in places)
    return "" if said or values >= needed else f"{needed} arguments are needed"


def test_the_messages_are_found() -> None:
    assert len(SUGGESTED) > 100


@pytest.mark.parametrize(
    ("place", "words", "rest"), SUGGESTED, ids=[f"{place} {words}" for place, words, _ in SUGGESTED]
)
def test_a_named_command_can_be_typed(place: str, words: str, rest: str) -> None:
    assert not wrong(words, rest), f"{place}: tunedeck {words}"
