"""Documents of text files: a file, or what a blank line or a separator ends. They are found once by their bytes and
read on demand, so that a corpus larger than memory can be prepared."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.config.files.caches import cache_folder
from engine.config.files.data_files import COMPRESSION_SUFFIXES
from engine.data.records import conversion, open_unpacked
from engine.data.store import make_cache_folder
from engine.errors import DataError

PART_BYTES = 8 << 20
"""A document of more bytes is tokenised in parts that end at a line's end; only the last part ends the document."""

SEPARATORS = {"paragraph": "\n\n"}
"""The separator that a unit's name means."""


class Documents:
    """The documents of text files as rows: `text`, and whether it starts and ends its document."""

    in_lists = True
    """Slices are lists of rows."""

    def __init__(self, files: Sequence[Path], unit: str) -> None:
        """`unit`: "file", "paragraph", or the text that ends a document. Raises DataError for text that is not
        UTF-8."""
        self._files = files
        separator = None if unit == "file" else SEPARATORS.get(unit, unit).encode()
        parts = [(number, *span) for number, file in enumerate(files) for span in _parts(file, separator)]
        self._parts = np.array(parts, np.int64).reshape(-1, 5)
        whole = separator is not None and sum(ends for *_, ends in parts) <= len(files)
        self.unseparated = whole and not any(_holds(file, separator or b"") for file in files)
        """No file has the separator."""

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, rows: slice) -> list[dict[str, Any]]:
        return [self._row(*map(int, part)) for part in self._parts[rows]]

    def section(self, start: int, stop: int) -> Documents:
        """Return the rows from `start` to before `stop` without reading them."""
        section = copy.copy(self)
        section._parts = self._parts[start:stop]
        return section

    def nbytes(self, start: int, stop: int) -> int:
        """Bytes of the rows from `start` to before `stop`."""
        return int((self._parts[start:stop, 2] - self._parts[start:stop, 1]).sum())

    def _row(self, number: int, start: int, stop: int, starts: int, ends: int) -> dict[str, Any]:
        with self._files[number].open("rb") as stream:
            stream.seek(start)
            raw = stream.read(stop - start)
        try:
            text = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._files[number]} is not UTF-8 text (byte {start + error.start:,})",
                fix=conversion(self._files[number]),
            ) from error
        return {"text": text, "starts": bool(starts), "ends": bool(ends)}


def _parts(file: Path, separator: bytes | None) -> Iterator[tuple[int, int, int, int]]:
    """(first byte, byte after the last, starts a document, ends it) of each part of a document."""
    for start, stop in _documents(file, separator):
        first = start
        with file.open("rb") as stream:
            while stop - first > PART_BYTES:
                stream.seek(first)
                piece = stream.read(PART_BYTES)
                length = piece.rfind(b"\n") + 1 or piece.rfind(b" ") or _whole_letters(piece)
                yield first, first + length, int(first == start), 0
                first += length
        yield first, stop, int(first == start), 1


def _documents(file: Path, separator: bytes | None) -> Iterator[tuple[int, int]]:
    """First byte and byte after the last of each document that is not empty; separators belong to none."""
    size = file.stat().st_size
    if separator is None:
        yield 0, size
        return
    start, base, kept = 0, 0, b""
    with file.open("rb") as stream:
        while block := stream.read(PART_BYTES):
            block = kept + block
            place = 0
            while (found := block.find(separator, place)) >= 0:
                if block[place:found].strip():
                    yield start, base + found
                place = found + len(separator)
                start = base + place
            # A separator may begin at the end of this block.
            keep = max(place, len(block) - len(separator) + 1)
            kept, base = block[keep:], base + keep
    if start < size:
        yield start, size


def _holds(file: Path, separator: bytes) -> bool:
    kept = b""
    with file.open("rb") as stream:
        while block := stream.read(PART_BYTES):
            if separator in kept + block:
                return True
            kept = block[-len(separator) :]
    return False


def _whole_letters(piece: bytes) -> int:
    """Bytes up to the start of the last letter, which may be cut."""
    return next(place for place in range(len(piece) - 1, 0, -1) if piece[place] & 0xC0 != 0x80)


def unpacked(file: Path, digest: str) -> Path:
    """The file itself, or a copy in the cache folder of one that is compressed."""
    if file.suffix.lower() not in COMPRESSION_SUFFIXES:
        return file
    folder = cache_folder() / "unpacked"
    make_cache_folder(folder)
    unpacked_file = folder / digest
    if not unpacked_file.exists():
        with tempfile.TemporaryDirectory(dir=folder) as drafts, open_unpacked(file) as packed:
            draft = Path(drafts, digest)
            with draft.open("wb") as stream:
                shutil.copyfileobj(packed, stream)
            draft.replace(unpacked_file)
    return unpacked_file
