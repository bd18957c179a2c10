"""The bounds of what is read from a data file: length and nesting of a line, size of a row, of an image, of a file once
unpacked. What lies beyond them is left out and counted, before a library for data opens the file."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

import pyarrow
import pyarrow.parquet

from engine.config.files.caches import cache_folder
from engine.config.files.data_files import COMPRESSION_SUFFIXES, LOADERS, suffix_of
from engine.data.csv_files import line_end
from engine.data.records import Screened, open_unpacked
from engine.errors import DataError

MIB, GIB = 1 << 20, 1 << 30

LINE_BYTES = 16 * MIB
"""Largest line of a JSON or text file and record of a CSV file, unpacked."""

DEPTH = 50
"""Deepest nesting of lists and objects. Arrow takes 64 levels, its reader crashes on some ten thousand."""

DOCUMENT_BYTES = 2 * GIB
"""Largest file that is one JSON list, which its reader holds in memory."""

UNPACKED_RATIO, UNPACKED_FREE = 200, 64 * MIB
"""A file is read until it has unpacked to this many times its size; the first UNPACKED_FREE bytes in any case."""

UNPACKED_BYTES = 256 * GIB
"""What the files of a source may unpack to in all."""

CHARACTERS_PER_TOKEN = 64
"""A row with more characters than this for each token of data.max_length is not tokenised."""

IMAGE_BYTES = 256 * MIB
"""Largest image file."""

IMAGE_PIXELS = 80_000_000
"""Pixels of the largest image, told by its header before it is decoded."""

LINE_TOO_LONG = f"a line of more than {LINE_BYTES // MIB} MiB"
TOO_DEEP = f"nested more than {DEPTH} levels deep"
UNPACKS_TOO_FAR = (
    f"the rest of its file, which unpacks to more than {UNPACKED_RATIO} times its size, or its source "
    f"to more than {UNPACKED_BYTES // GIB} GiB"
)
TOO_MANY_CHARACTERS = f"more than {CHARACTERS_PER_TOKEN} characters for each token of data.max_length"
"""Reasons for which a line or row is left out; `engine.data.records` has the bounds of rows."""

READ_BYTES = MIB


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file. Raises OSError for anything else (a pipe, a device, a folder) and for more than
    `most` bytes, ValueError for a path that no file can have."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without waiting for a pipe's writer
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(f"{path} has more than {most // MIB} MiB")
    return data


class Nesting:
    """Deepest nesting of lists and objects in JSON text that comes in pieces."""

    _STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|(\\?\Z))', re.DOTALL)
    _REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|(\\?\Z))', re.DOTALL)
    _BRACKET = re.compile(rb"[\[\]{}]")

    def __init__(self) -> None:
        self.deepest = self._depth = 0
        self._inside, self._carry = False, b""

    def add(self, piece: bytes) -> None:
        """Pieces may end anywhere."""
        piece, self._carry = self._carry + piece, b""
        start = 0
        if self._inside and (rest := self._REST.match(piece)):
            start = self._end(rest)
        plain = self._STRING.sub(self._strip, piece[start:]) if not self._inside else b""
        for bracket in self._BRACKET.findall(plain):
            self._depth += 1 if bracket in b"[{" else -1
            self.deepest = max(self.deepest, self._depth)

    def _strip(self, string: re.Match[bytes]) -> bytes:
        self._end(string)
        return b""

    def _end(self, string: re.Match[bytes]) -> int:
        """Note whether a string goes on in the next piece, and keep a backslash that escapes its first byte."""
        self._inside, self._carry = string[1] is not None, string[1] or b""
        return string.end()


def is_too_deep(text: bytes) -> bool:
    if text.count(b"[") + text.count(b"{") <= DEPTH:
        return False
    nesting = Nesting()
    nesting.add(text)
    return nesting.deepest > DEPTH


class _UnpacksTooFar(Exception):
    """The file or its source unpacks beyond its bound."""


class _Meter:
    """Counts what a file unpacks to."""

    def __init__(self, packed: int, before: int) -> None:
        self._most = min(max(UNPACKED_FREE, UNPACKED_RATIO * packed), UNPACKED_BYTES - before)
        self.unpacked = 0

    def add(self, count: int) -> None:
        self.unpacked += count
        if self.unpacked > self._most:
            raise _UnpacksTooFar


def screen(files: Sequence[Path], digests: Sequence[str]) -> list[Screened]:
    """Each file as it may be read. `digests` are hashes of the files' contents, under which results are kept.

    Raises DataError for a file that is beyond a bound as a whole; what opening and unpacking raises.
    """
    found: list[Screened] = []
    for file, digest in zip(files, digests, strict=True):
        found.append(_screened(file, digest, sum(each.unpacked for each in found)))
    return found


def _screened(file: Path, digest: str, before: int) -> Screened:
    kind = LOADERS.get(suffix_of(file), "")
    if kind not in ("json", "csv", "text", "parquet"):
        return Screened(file, file, unpacked=file.stat().st_size)
    after = f"-{before}" if before + file.stat().st_size > UNPACKED_BYTES // 2 else ""
    note = cache_folder() / "screened" / f"{digest}-{kind}{after}-3.json"  # 3: what such a note says
    known = _known(note, file)
    if known is None:
        copy = note.with_suffix(suffix_of(file))
        known = _screen_lines(file, kind, before, copy) if kind != "parquet" else _screen_parquet(file, before)
        _write_note(note, known)
    return known


def _known(note: Path, file: Path) -> Screened | None:
    """The result of an earlier screening; None if there is none that can be used."""
    try:
        known = Screened(**{**json.loads(note.read_text()), "file": file})
    except (OSError, ValueError, TypeError):
        return None
    copy = note.with_suffix(suffix_of(file))
    known.reads = copy if known.dropped else file
    return known if known.reads.exists() else None


def _write_note(note: Path, screened: Screened) -> None:
    draft = note.with_name(f"{note.name}.{os.getpid()}")
    draft.write_text(json.dumps({**asdict(screened), "file": "", "reads": ""}))
    draft.replace(note)


def _screen_lines(file: Path, kind: str, before: int, copy: Path) -> Screened:
    with open_unpacked(file) as stream:
        head = stream.read(READ_BYTES).lstrip()
    if kind == "json" and head[:1] == b"[":
        return Screened(file, file, unpacked=_document_bytes(file, before))
    screened = Screened(file, file)
    for _ in _kept_lines(file, kind, before, screened):
        pass
    if screened.dropped:
        screened = Screened(file, copy)
        with tempfile.NamedTemporaryFile(dir=copy.parent, delete=False) as draft:
            try:
                draft.writelines(_kept_lines(file, kind, before, screened))
            except BaseException:
                os.unlink(draft.name)
                raise
        os.replace(draft.name, copy)
    return screened


def _kept_lines(file: Path, kind: str, before: int, screened: Screened) -> Iterator[bytes]:
    """The lines within the bounds; in JSON an empty line for each other one, so that the lines keep their numbers."""
    meter, number = _Meter(_packed_bytes(file), before), 0
    try:
        with open_unpacked(file) as stream:
            for number, line in enumerate(_lines(stream, meter, quoted=kind == "csv"), start=1):
                reason = LINE_TOO_LONG if line is None else TOO_DEEP if kind == "json" and is_too_deep(line) else None
                if reason is not None:
                    if kind == "csv" and number == 1:
                        raise DataError(f"{file}:1: the names of the columns are {reason}", fix="correct that line")
                    screened.leave_out(reason, number)
                    yield b"\n" if kind == "json" else b""
                elif line is not None:
                    screened.kept += bool(line.strip())
                    yield line
    except _UnpacksTooFar:
        screened.leave_out(UNPACKS_TOO_FAR, number + 1)
    screened.unpacked = meter.unpacked


def _lines(stream: IO[bytes], meter: _Meter, *, quoted: bool) -> Iterator[bytes | None]:
    """Lines with their ends, None for one beyond LINE_BYTES; a `quoted` record goes on where a quote is open. Only a
    quote at the start of a field opens one."""
    parts: list[bytes] = []
    size, is_open = 0, False
    first = stream.readline(READ_BYTES)
    end = line_end(first).encode() if quoted else b"\n"
    for piece in _pieces(stream, first, end):
        meter.add(len(piece))
        size += len(piece)
        if quoted and piece.count(b'"') % 2 == 1:
            is_open = not is_open and _OPENING_QUOTE.search(piece) is not None
        if size <= LINE_BYTES:
            parts.append(piece)
        else:
            parts.clear()
        if piece.endswith(end) and not is_open:
            yield b"".join(parts) if size <= LINE_BYTES else None
            parts, size = [], 0
    if size:
        yield b"".join(parts) if size <= LINE_BYTES else None


def _pieces(stream: IO[bytes], first: bytes, end: bytes) -> Iterator[bytes]:
    """Yield `first`, which was read, and what follows: lines that end with `end`, or parts of READ_BYTES of longer
    ones."""
    while first:
        yield from [first] if end == b"\n" else re.findall(rb"[^\r]*+\r|[^\r]++", first)
        first = stream.readline(READ_BYTES)


_OPENING_QUOTE = re.compile(rb'(?:^|[,\t])"')


def _document_bytes(file: Path, before: int) -> int:
    """Unpacked bytes of a file that is one JSON list. Raises DataError beyond a bound."""
    meter, nesting = _Meter(_packed_bytes(file), before), Nesting()
    with open_unpacked(file) as stream:
        try:
            while piece := stream.read(READ_BYTES):
                meter.add(len(piece))
                nesting.add(piece)
                if meter.unpacked > DOCUMENT_BYTES or nesting.deepest > DEPTH:
                    break
        except _UnpacksTooFar:
            raise _too_far(file) from None
    if nesting.deepest > DEPTH:
        raise DataError(f"{file} is one JSON document, {TOO_DEEP}", fix="write one object per line, as .jsonl")
    if meter.unpacked > DOCUMENT_BYTES:
        raise DataError(
            f"{file} is one JSON document of more than {DOCUMENT_BYTES // GIB} GiB, which is read as a whole",
            fix="write one object per line, as .jsonl",
        )
    return meter.unpacked


def _screen_parquet(file: Path, before: int) -> Screened:
    """Raises DataError if all rows in memory are beyond a bound."""
    meter = _Meter(_packed_bytes(file), before)
    with pyarrow.parquet.ParquetFile(file) as opened:
        groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
        try:
            meter.add(sum(group.total_byte_size for group in groups))
            meter.unpacked = 0
            # Repeated values are stored once, so the file's own figures do not bound what its rows need.
            for batch in opened.iter_batches(batch_size=PARQUET_ROWS, use_threads=False):
                meter.add(batch.nbytes)
        except _UnpacksTooFar:
            raise _too_far(file) from None
    return Screened(file, file, unpacked=meter.unpacked)


PARQUET_ROWS = 64
"""Rows of a Parquet file in memory at once while it is screened."""


def _too_far(file: Path) -> DataError:
    return DataError(
        f"{file} unpacks to more than {UNPACKED_RATIO} times its size, or its source to more than "
        f"{UNPACKED_BYTES // GIB} GiB",
        fix="if this is intended, unpack it yourself and use the unpacked file",
    )


def _packed_bytes(file: Path) -> int:
    """A file that is not compressed has no ratio."""
    size = file.stat().st_size
    packed = suffix_of(file) == ".parquet" or file.suffix.lower() in COMPRESSION_SUFFIXES
    return size if packed else UNPACKED_BYTES
