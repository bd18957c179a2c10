"""Finds every fix text in the code, and says where a fix that was given comes from.

A fix text is what stands behind `fix=` where an error or a warning is made. Its key is the file, the function and the
text, such as `commands/compare:_metric: add --metric loss`; values in it are written as in the code, in braces.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTHING = frozenset({"''", "error.fix", "unknown.fix", "problem.fix"})


@dataclass(frozen=True)
class FixText:
    place: str
    """File without its suffix, and function: `commands/compare:_metric`."""
    text: str
    pattern: str
    """A regular expression of the text with any values."""

    @property
    def key(self) -> str:
        return f"{self.place}: {self.text}"


def fix_texts() -> list[FixText]:
    found: list[FixText] = []
    for path in sorted([*ROOT.glob("engine/**/*.py"), *ROOT.glob("tui/**/*.py")]):
        found += _of_node(ast.parse(path.read_text("utf-8")), place_of(path))
    return found


def place_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("engine/")


def _of_node(node: ast.AST, file: str, function: str = "", handed_on: frozenset[str] = NOTHING) -> Iterator[FixText]:
    """`handed_on`: expressions that are nothing, or the fix of another error."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = node.name
        arguments = {each.arg for each in [*node.args.args, *node.args.kwonlyargs]}
        handed_on = NOTHING | ({"fix"} & arguments)
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "fix" and ast.unparse(keyword.value) not in handed_on:
                yield FixText(f"{file}:{function}", *_text_of(keyword.value))
    for child in ast.iter_child_nodes(node):
        yield from _of_node(child, file, function, handed_on)


def _text_of(value: ast.expr) -> tuple[str, str]:
    if isinstance(value, ast.Constant):
        return str(value.value), re.escape(str(value.value))
    if isinstance(value, ast.JoinedStr):
        parts = [
            (str(part.value), re.escape(str(part.value)))
            if isinstance(part, ast.Constant)
            else ("{" + ast.unparse(part).strip("f'\"{}") + "}", ".*")
            for part in value.values
        ]
        return "".join(text for text, _ in parts), "".join(pattern for _, pattern in parts)
    return "{" + ast.unparse(value) + "}", ".*"
