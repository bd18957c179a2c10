"""Keeps what an evaluation has computed, so that an interrupted evaluation continues where it stopped.

Answers and losses are appended to a file as soon as they are computed, one JSON object per line. A line that a crash
left incomplete is ignored, and its values are computed again.

Try: `ls runs/*/evaluations/`
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class KeptAnswers:
    """The answers generated so far, by the sample's number; kept in the file `path`, or in memory alone if that is
    None."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.texts: dict[int, str] = {int(row["sample"]): str(row["answer"]) for row in _rows(path)}

    def add(self, texts: Mapping[int, str]) -> None:
        """Add `texts`, answers by the sample's number. Raises OSError if they cannot be written."""
        self.texts |= texts
        _append(self._path, [{"sample": sample, "answer": text} for sample, text in texts.items()])


class KeptLosses:
    """The sums of token losses of the groups of samples that were evaluated so far; kept in `path`, or in memory alone
    if that is None."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._sums: dict[tuple[int, ...], float] = {}
        taken: set[int] = set()
        for row in _rows(path):
            samples = tuple(map(int, row["samples"]))
            if not taken & set(samples):  # two processes cannot write at once, but a copied file may hold a group twice
                self._sums[samples] = float(row["loss"])
                taken |= set(samples)

    def add(self, samples: Sequence[int], loss: float) -> None:
        """Add the sum of the token losses of a group of samples. Raises OSError if it cannot be written."""
        self._sums[tuple(samples)] = loss
        _append(self._path, [{"samples": list(samples), "loss": loss}])

    def among(self, count: int) -> dict[tuple[int, ...], float]:
        """The kept sums by group, for the groups (tuples of sample numbers) whose samples are all among the first
        `count`."""
        return {samples: loss for samples, loss in self._sums.items() if max(samples, default=0) < count}


def _rows(path: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each complete line of a file; nothing if there is no file."""
    if path is None or not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:  # the rest of a torn line, and the line that was appended to it
                continue
            if isinstance(row, dict):
                yield row


def _append(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Append `rows` to a file as JSON lines, and wait until they are on the disk; do nothing if `path` is None."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        torn = file.tell() and not _ends_with_newline(file.fileno(), file.tell())
        file.write(("\n" if torn else "").encode() + "".join(json.dumps(row) + "\n" for row in rows).encode("ascii"))
        file.flush()
        os.fsync(file.fileno())


def _ends_with_newline(descriptor: int, size: int) -> bool:
    return os.pread(descriptor, 1, size - 1) == b"\n"
