"""Finds lines of JSON files for messages: the first one that does not parse, and those of dropped rows.

Try: `pytest tests/data/test_sources.py -k json`
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import IO

COMPRESSED = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile, ".bz2": bz2.BZ2File}
"""Class that reads a compressed file as bytes, by suffix."""

SHOWN = 60
"""Characters of a broken line that are shown."""


def find_json_error(files: Sequence[Path]) -> str | None:
    """`FILE:LINE: the problem` of the first file that does not parse; None when all of them do."""
    for file in files:
        try:
            problem = _document_problem(file) if file.name.lower().removesuffix(".gz").endswith(".json") else None
            problem = _line_problem(file) if problem is None else problem
        except (OSError, EOFError, lzma.LZMAError) as error:
            return f"{file}: {error}"
        if problem:
            return f"{file}:{problem}"
    return None


def find_json_lines(files: Sequence[Path], rows: Sequence[int]) -> dict[int, str]:
    """Map each of `rows` (counted from 0 over all files) to its `FILE:LINE`; rows that are not found are left out.

    Returns an empty dict when the line of a row is not a JSON object, because then the file is not JSON lines.
    """
    found: dict[int, str] = {}
    row = 0
    for file in files if rows else ():
        with _open(file) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                if row in rows:
                    if not _is_object(line):
                        return {}
                    found[row] = f"{file}:{number}"
                    if len(found) == len(set(rows)):
                        return found
                row += 1
    return found


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _line_problem(file: Path) -> str:
    """`LINE: the problem` of the first line that is not a JSON object; "" when all of them are."""
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                return f"{number}: not JSON ({_reason(error)}): {_excerpt(line)}"
            except RecursionError:
                return f"{number}: nested too deeply to be read: {_excerpt(line)}"
            if not isinstance(value, dict):
                return f"{number}: an object was expected, found {type(value).__name__}: {_excerpt(line)}"
    return ""


def _document_problem(file: Path) -> str | None:
    """`LINE: the problem` of a file that is one JSON document; "" if it parses; None if it looks like JSON lines."""
    with _open(file) as stream:
        raw = stream.read()
    try:
        json.loads(raw.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return None if raw.lstrip().startswith(b"{") else f"{error.lineno}: not JSON ({error.msg})"
    except RecursionError:
        return None if raw.lstrip().startswith(b"{") else "1: nested too deeply to be read"
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return f"{line}: not UTF-8 text"
    return ""


def _open(file: Path) -> IO[bytes]:
    return COMPRESSED[file.suffix](file) if file.suffix in COMPRESSED else file.open("rb")


def _reason(error: ValueError) -> str:
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "not UTF-8 text"


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace").strip()
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")
