"""What the first docstrings of rooms tell a reader to try is there to be tried."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_tests_that_rooms_name_exist() -> None:
    named = {
        (str(room.relative_to(ROOT)), test)
        for folder in ("engine", "tui", "tests", "benchmarks")
        for room in (ROOT / folder).rglob("*.py")
        for test in re.findall(r"tests/[\w/]+\.py", room.read_text("utf-8"))
    }
    assert len(named) > 50
    assert [(room, test) for room, test in sorted(named) if not (ROOT / test).is_file()] == []
