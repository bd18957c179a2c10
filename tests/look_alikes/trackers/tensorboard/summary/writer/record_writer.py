"""Looks like tensorboard's writer of records: here one line each."""

from typing import IO


class RecordWriter:
    """Writes records into a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, record: bytes) -> None:
        self._file.write(record + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
