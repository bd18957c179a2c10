"""The log of an engine: its end, what is added to it, its levels, and no escape code of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tui.run.line_kinds import EVENT_KINDS, LOG_LEVELS, next_kind
from tui.run.log_tail import READ_BYTES, LogLine, LogTail, level_of
from tui.run.panels import log_lines
from tui.run.watch import FeedLine


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def texts(tail: LogTail) -> list[str]:
    tail.refresh()
    return [line.text for line in tail.take()]


def test_of_a_log_of_megabytes_the_end_is_read_without_escape_codes(log: Path) -> None:
    with log.open("wb") as file:
        file.write(b"line\n" * 1_000_000)
        file.write(b"10 %\r20 %\r\x1b[31m30 %\x1b[0m\n  indented\n\x1b]0;title\x07\x1b[2J\x1b(plain\x00\n")
    tail = LogTail(log)
    lines = texts(tail)
    assert lines[-3:] == ["30 %", "  indented", "(plain"]
    assert set(lines[:-3]) == {"line"}
    assert len(lines) < 20_000
    assert not tail.refresh()


def test_only_what_is_added_is_returned_and_a_line_without_its_end_waits(log: Path) -> None:
    log.write_text("one\ntw")
    tail = LogTail(log)
    assert texts(tail) == ["one"]
    assert tail.unfinished is not None
    assert tail.unfinished.text == "tw"
    with log.open("a") as file:
        file.write("o\n\nthree\n")
    assert texts(tail) == ["two", "three"]
    assert tail.unfinished is None
    assert not tail.refresh()


def test_a_flood_between_two_readings_is_skipped_to_its_end(log: Path) -> None:
    log.write_text("one\n")
    tail = LogTail(log)
    assert texts(tail) == ["one"]
    with log.open("a") as file:
        file.writelines(f"line {number:08}\n" for number in range(READ_BYTES))
    lines = texts(tail)
    assert lines[-1] == f"line {READ_BYTES - 1:08}"
    assert {len(line) for line in lines} == {13}, "no line is torn"
    log.write_text("anew\n")
    assert texts(tail) == ["anew"]


def test_a_log_that_is_not_there_has_not_changed(log: Path) -> None:
    assert not LogTail(log).refresh()


def test_levels_include_all_lines_of_a_traceback(log: Path) -> None:
    log.write_text("12:00 tunedeck WARNING slow\nTraceback (most recent call last):\n  File x\nmy.Bad: no\nINFO fine\n")
    tail = LogTail(log)
    tail.refresh()
    assert [line.level for line in tail.take()] == ["warning", "error", "error", "error", "info"]
    assert [level_of(text) for text in ("torch.OutOfMemoryError: x", "x.py:3: UserWarning: y", "no errors found")] == [
        "error", "warning", "info",
    ]  # fmt: skip


def test_the_kinds_go_round_and_a_failed_end_is_a_problem() -> None:
    names = [""]
    for _ in LOG_LEVELS:
        names.append(next_kind(LOG_LEVELS, names[-1])[0])
    assert names == ["", "warnings and errors", "errors", ""]
    is_problem = EVENT_KINDS["problems"]
    assert is_problem is not None
    ends = [FeedLine("", "run_finished", text) for text in ("failed: no disk", "done", "oom: no remedy")]
    assert [is_problem(end) for end in ends] == [True, False, True]


@pytest.mark.parametrize("width", [20, 40, 72])
def test_a_line_of_the_log_is_broken_between_words_and_keeps_its_indentation(width: int) -> None:
    """Regression: the gradient norm was "t" at the end of a line and "he" at the beginning of the next."""
    text = '  File "x.py", line 3: the gradient norm of step 22 is 17.76, 5 times the usual value'
    lines = [line.plain for line in log_lines(LogLine(text, "info"), width)]
    assert all(len(line) <= width for line in lines)
    assert " ".join(line.strip() for line in lines) == text.strip()
    assert lines[0].startswith("   File")
    assert [len(line.plain) for line in log_lines(LogLine("x" * 35, "info"), 13)] == [13, 13, 12]
