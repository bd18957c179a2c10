"""No message and no help promises a time that nobody measured.

A promise is a phrase such as "takes seconds", "about 94 s" or "in a few minutes" in a text of engine or console, or in
the description of a setting. One may stay if a page of the documentation says what was measured.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_suggested_commands import texts_of

ROOT = Path(__file__).parents[2]

UNIT = r"(?:(?<= )s|seconds?|minutes?|hours?|days?|processor time)\b"
PROMISE = re.compile(
    rf"\b(?:takes?|taking|lasts?|needs?|within|about|around|some|a few|several|up to|less than|under)\b"
    rf"[^.;:,]{{0,25}}?(?<![\w.]){UNIT}|\bseconds to minutes\b|\bin (?:a few |some |\d+ |X )?(?:seconds|minutes)\b"
)

MEASURED = {
    "seconds to minutes": ("docs/memory.md", "took 2 to 157 s"),
}
"""Each promise, and where its measurement stands: a page and words there."""

LIMITS = {
    "Wait up to this many seconds": "what the user sets",
    "Wait up to this long for a busy device": "what the user sets",
    "a pass of X tokens takes X s": "what the run that says it has measured",
    "within X minutes": "a limit that the program keeps, told when it is reached",
    "more than X s": "a limit that the program keeps, told when it is reached",
    "within X s": "a limit that the program keeps, told when it is reached",
}
"""Not promises: a time that is set, or kept."""


def texts() -> Iterator[tuple[str, str]]:
    """Place and text of each string of engine and console, and of each description of a setting."""
    for path in sorted([*ROOT.glob("engine/**/*.py"), *ROOT.glob("tui/**/*.py")]):
        tree = ast.parse(path.read_text("utf-8"))
        place = str(path.relative_to(ROOT))
        yield from ((f"{place}:{line}", text) for line, text in texts_of(tree))
        if "config/schema" in place:
            docs = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
            yield from (
                (f"{place}:{node.lineno}", " ".join(node.value.split()))
                for node in docs
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            )


def promises() -> list[tuple[str, str]]:
    found = [(place, text) for place, text in texts() if PROMISE.search(text) and "\n" not in text.strip()]
    return [(place, text) for place, text in found if not any(limit in text for limit in LIMITS)]


def test_every_promise_of_a_time_was_measured() -> None:
    unmeasured = [each for each in promises() if not any(promise in each[1] for promise in MEASURED)]
    assert not unmeasured


@pytest.mark.parametrize("promise", MEASURED)
def test_what_was_measured_is_promised_and_stands_in_the_documentation(promise: str) -> None:
    page, words = MEASURED[promise]
    assert words in (ROOT / page).read_text("utf-8")
    assert any(promise in text for _, text in promises())


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_no_promise_still_stands_somewhere(limit: str) -> None:
    assert any(limit in text for _, text in texts())


@pytest.mark.parametrize(
    "text", ["about 94 s of processor time", "which takes some seconds", "ready in a few minutes", "this takes X s"]
)
def test_a_promise_is_recognised(text: str) -> None:
    assert PROMISE.search(text)
