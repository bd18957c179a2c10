"""Writes a file under a name that is still free.

Try: `write_new(Path("."), "plot-loss", ".svg", "<svg/>")`
"""

from __future__ import annotations

from pathlib import Path


def write_new(folder: Path, name: str, ending: str, text: str) -> Path:
    """Write `text` into `folder` as NAME, or as NAME-2, NAME-3 and so on where that exists; returns the path. Raises
    OSError if it cannot be written; what was begun is then removed."""
    number = 0
    while True:
        number += 1
        path = folder / f"{name}{f'-{number}' if number > 1 else ''}{ending}"
        try:
            file = path.open("x", encoding="utf-8")
        except FileExistsError:
            continue
        try:
            with file:
                file.write(text)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path
