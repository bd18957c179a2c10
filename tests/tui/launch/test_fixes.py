"""Fixes as lines of Launch, at 80 columns and above."""

from __future__ import annotations

import pytest

from engine.budget.advise.search import advise
from engine.config.files.caches import SequenceBounds
from engine.config.load import resolve
from tui.launch.fixes import fix_lines


@pytest.mark.parametrize("width", [78, 80, 120])
def test_a_fix_of_two_changes_is_not_cut(width: int) -> None:
    advice = advise(resolve("demo", "demo").spec, known=SequenceBounds(64))
    assert any(len(each.changes) > 1 for each in advice.suggestions)
    lines = fix_lines(advice, width)
    for suggestion in advice.suggestions:
        text = " ".join(line.plain for line, of in lines if of is suggestion)
        assert all(key.rpartition(".")[2] in text for key in suggestion.changes) and "…" not in text
    assert all(line.cell_length < width for line, _ in lines)
