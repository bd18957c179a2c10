"""An element of a JSON list that goes on for many blocks is read in a time by its length."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from engine.data import json_rows


class CountedFile(io.BytesIO):
    """Counts how often it is read: an element is parsed again after each time."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        return super().read(size)


def test_a_long_element_is_parsed_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "BLOCK_BYTES", 1 << 10)
    stream = CountedFile(b'["' + b"x" * (1 << 20) + b'", 1]')
    text = json_rows._ListText(Path("list.json"), stream)
    text.require("[")
    assert text.value() == ("x" * (1 << 20), "") and text.require(",") == ","
    assert stream.reads < 15
