"""Draws the packages of the engine from top to bottom, in the order of the import contract in pyproject.toml.

Run: make pages        (writes docs/pictures/packages.svg)

Each row is one layer of the contract; a package imports only packages in rows below it. The text next to a name is the
first sentence of the package's docstring. `tests/docs/test_reference_pages.py` compares the picture with the code.
"""

from __future__ import annotations

import ast
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH, ROW, GAP, LEFT, NAME_WIDTH = 960, 26, 6, 16, 150
COLOURS = {"interface": "#e8e6fb", "extra": "#fdf0da", "core": "#e2f0e8", "bottom": "#e6edf5"}
LIGHT = ("launch", "checks", "budget", "architecture", "journal", "config", "errors")
"""The packages that import no torch, as the contract of the same file says."""


def drawing() -> str:
    """Return the picture as SVG text."""
    rows: list[tuple[str, str, str]] = [("tui", sentence(ROOT / "tui"), "interface")]
    for name in _layers():
        package = name.removeprefix("engine.").replace(".", "/")
        folder = package.partition("/")[0]
        if package == "extras":
            rows += [(f"extras/{path.name}", sentence(path), "extra") for path in _packages(ROOT / "engine" / "extras")]
            continue
        kind = "interface" if folder in ("cli", "commands") else "bottom" if folder in LIGHT else "core"
        rows.append((package, sentence(ROOT / "engine" / package), kind))
    height = GAP + len(rows) * (ROW + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for index, (name, text, kind) in enumerate(rows):
        top = GAP + index * (ROW + GAP)
        indent = 24 if kind == "extra" else 0
        lines += [
            f'<rect x="{LEFT + indent}" y="{top}" width="{WIDTH - 2 * LEFT - indent}" height="{ROW}" rx="4" '
            f'fill="{COLOURS[kind]}"/>',
            f'<text x="{LEFT + indent + 10}" y="{top + 18}" font-weight="bold" fill="#1d1d1f">{escape(name)}</text>',
            f'<text x="{LEFT + indent + NAME_WIDTH}" y="{top + 18}" fill="#1d1d1f">{escape(text)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def sentence(package: Path) -> str:
    """Return the first sentence of the docstring of a package or module, without the full stop."""
    file = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")


def _layers() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if "engine.cli" in contract.get("layers", ()))
    return [name for layer in layers for name in layer.split(" | ")]


def _packages(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file())
