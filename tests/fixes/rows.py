"""A row of a table: a state, a command that fails in it, and the command that its fix text asks for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.cli.conftest import Tunedeck
from tests.cli.test_fixes import suggested
from tests.fixes.conftest import Given
from tests.fixes.walk import FixText, fix_texts

State = Callable[[Path], None]

TEXTS = fix_texts()


class Row(NamedTuple):
    state: State
    typed: str
    """The command that fails."""
    right: str | None = None
    """What the fix says to type; None: it is taken from the text."""
    change: State | None = None
    """What the fix says to do before."""
    answer: str = ""
    """Words that the right command prints."""
    code: int = 0
    """How the right command ends: not with 0 where it meets the next thing that is wrong."""


def text_of(key: str) -> FixText:
    """The fix text with this key, else the one whose key begins so."""
    found = {text.key: text for text in TEXTS if text.key.startswith(key)}
    if key in found:
        return found[key]
    (only,) = found.values()
    return only


def was_given(text: FixText, given: Given) -> bool:
    return any(place == text.place and re.fullmatch(text.pattern, fix, re.DOTALL) for place, fix in given)


def walk(key: str, row: Row, tunedeck: Tunedeck, folder: Path, given: Given) -> None:
    """The fix is given, typed, and then neither given again nor followed by another error than `row.code` allows."""
    text = text_of(key)
    row.state(folder)
    refused = tunedeck(*shlex.split(row.typed))
    assert refused.code != 0, refused.out
    assert was_given(text, given), (given, refused.err)
    given.clear()
    if row.change is not None:
        row.change(folder)
    words = shlex.split(row.right) if row.right is not None else suggested(row.typed, refused.err)
    answer = tunedeck(*words)
    assert answer.code == row.code, answer.err
    assert row.answer in answer.out + answer.err
    assert not was_given(text, given), answer.err
