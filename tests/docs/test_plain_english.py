"""Pages, messages and docstrings are in plain English: none of the phrases of plain_english.toml, and docstrings that
begin with a verb. Texts that have not been rewritten yet have a limit there, which may only fall.

Try: TUNEDECK_ACCEPT=1 pytest tests/docs/test_plain_english.py, which lowers the limits to what is left.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomli

from tests.docs.blocks import PAGES, ROOT

TABLE = Path(__file__).with_name("plain_english.toml")
LIMITS: dict[str, int] = tomli.loads(TABLE.read_text("utf-8"))["limits"]
PLAIN: dict[str, str] = tomli.loads(TABLE.read_text("utf-8"))["phrases"]
PHRASES = {re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE): plain for phrase, plain in PLAIN.items()}
FRAGMENT = re.compile(
    r"(Of|For|As|With|Without|By|In|Inside|Where|From|On|After|Also|At|Its|While|All|One|Every|Those|Each|Most|None|Nothing"
    r"|Around|Only|Everything|To) "
)
"""How docstrings of functions begin that have no verb first."""

FROM_CODE = ("CHANGELOG.md", "command-reference.md", "keys.md", "model-types.md", "families.md", "style.md")
"""Pages of other rules: history, texts of the code (which count there), and the page that lists the phrases."""
SLACK = 25
"""How far a limit may be above what is left, so that branches that lower it at the same time do not conflict."""

Place = tuple[Path, int, str]


def page_texts() -> Iterator[Place]:
    """The prose of each line: without fenced blocks, code and addresses of links; tables of keys are from the code."""
    for page in PAGES:
        text = page.read_text("utf-8") if page.name not in FROM_CODE else ""
        text = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
        for line, words in enumerate(text.partition("\n## All keys")[0].splitlines(), start=1):
            yield page, line, re.sub(r"`[^`]*`|\]\([^)]*\)", "", words)


@cache
def code_texts() -> dict[str, list[Place]]:
    """The strings of engine and console by area. Strings without a space are names."""
    texts: dict[str, list[Place]] = {"messages of engine": [], "messages of tui": [], "docstrings": []}
    texts["docstring fragments"] = []
    for path in [*ROOT.glob("engine/**/*.py"), *ROOT.glob("tui/**/*.py")]:
        tree = ast.parse(path.read_text("utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                area = "docstrings" if id(node) in alone else f"messages of {path.relative_to(ROOT).parts[0]}"
                texts[area].append((path, node.lineno, " ".join(node.value.split())))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and FRAGMENT.match(
                ast.get_docstring(node) or ""
            ):
                texts["docstring fragments"].append((path, node.lineno, f"{node.name}: begin with a verb"))
    return texts


def odd_places(area: str) -> list[tuple[Path, str]]:
    """File and description of each odd phrase of an area."""
    if area == "docstring fragments":
        return [(path, f"{path.relative_to(ROOT)}:{line}: {words}") for path, line, words in code_texts()[area]]
    return [
        (path, f'{path.relative_to(ROOT)}:{line}: "{found[0]}"; write: {plain}')
        for path, line, words in (page_texts() if area == "docs" else code_texts()[area])
        for phrase, plain in PHRASES.items()
        for found in phrase.finditer(words)
    ]


@pytest.mark.parametrize("area", LIMITS)
def test_plain_english(area: str) -> None:
    places, limit = odd_places(area), LIMITS[area]
    if os.environ.get("TUNEDECK_ACCEPT") and len(places) < limit:
        text = TABLE.read_text("utf-8")
        TABLE.write_text(re.sub(rf'^("?{area}"?) = \d+$', rf"\1 = {len(places)}", text, flags=re.M), "utf-8")
        limit = len(places)
    newest = [text for _, text in sorted(places, key=lambda place: -place[0].stat().st_mtime)[:20]]
    assert len(places) <= limit, "\n".join(
        [f"{area}: {len(places)} odd phrases, at most {limit}; newest files:", *newest]
    )
    assert len(places) + SLACK >= limit, f"{area}: {len(places)} are left; lower the limit: TUNEDECK_ACCEPT=1"


def test_a_phrase_is_found_and_a_plain_sentence_is_not() -> None:
    found = [plain for phrase, plain in PHRASES.items() if phrase.search("It refuses the file beside it, and says so.")]
    assert len(found) == 3
    assert not any(phrase.search("The file is an error: there is no key.") for phrase in PHRASES)
    assert FRAGMENT.match("Of one layer.") and not FRAGMENT.match("Return the bytes of one layer.")
