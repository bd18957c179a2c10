"""The outcome of a command line call: its exit code, what it wrote, and what an error message must look like."""

from __future__ import annotations

import re
from dataclasses import dataclass

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that move or colour a terminal; the line break and the tab are the only ones allowed."""

LONGEST_BLOCK = 12
"""Lines that still count as one short block."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    def complains(self, code: int, *words: str) -> None:
        """Assert that the command ended with this exit code, wrote nothing to stdout, and wrote one short error message
        with all of these words to stderr."""
        assert self.out == ""
        assert_block(self.err, *words)
        assert self.code == code, self.err


def assert_block(text: str, *words: str) -> None:
    """Assert that the text is one short error message: it begins with "tunedeck: ", has no traceback and no control
    characters, and contains these words."""
    assert text.startswith("tunedeck: "), text
    assert text.count("tunedeck: ") - text.count("fix: ") <= 1, text
    assert "Traceback" not in text, text
    assert not CONTROL.search(text), repr(text)
    assert len(text.splitlines()) <= LONGEST_BLOCK, text
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"
