"""Messages shortened to the footer's few lines."""

from __future__ import annotations

from textual.content import Content

from tui.keys import EVERYWHERE, Key
from tui.widgets.title_and_footer import MESSAGE_LINES, FooterBar, shorten_message


def lines(*sentences: str, width: int = 20) -> list[str]:
    return [line.plain.rstrip() for line in shorten_message(Content("\n".join(sentences)), width)]


def test_a_short_message_stands_as_it_is() -> None:
    assert lines("no room", "expected: some", "fix: make some") == ["no room", "expected: some", "fix: make some"]


def test_what_was_expected_goes_before_the_fix_does() -> None:
    assert lines("there is no room on it", "expected: some", "fix: make some") == [
        "there is no room on", "it", "fix: make some"
    ]  # fmt: skip


def test_a_long_complaint_is_cut_so_that_the_fix_is_whole() -> None:
    kept = lines("nothing can be made in /a/very/long/path/indeed/it/is", "fix: choose another with --runs")
    assert kept == ["nothing can be made…", "fix: choose another", "with --runs"]
    assert len(kept) == MESSAGE_LINES


def test_one_long_sentence_fills_the_lines() -> None:
    assert lines("one two three four five six seven eight nine ten eleven twelve") == [
        "one two three four", "five six seven eight", "nine ten eleven"
    ]  # fmt: skip


def test_a_disabled_key_takes_no_room_from_an_enabled_one() -> None:
    keys = [
        (Key("run", "p", "pause", "pause", ""), False),
        (Key("run", "z", "enlarge", "enlarge", ""), True),
        (Key(EVERYWHERE, "q", "quit", "quit", ""), True),
    ]
    footer = FooterBar()
    footer._keys = keys
    assert [footer._key_line(width).plain.split() for width in (40, 20, 17)] == [
        ["z", "enlarge", "p", "pause", "q", "quit"],
        ["z", "enlarge", "q", "quit"],
        ["q", "quit"],
    ]
