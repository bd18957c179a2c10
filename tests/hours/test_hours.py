"""A small share of the hours of use: `python -P -m tests.hours.run` takes all."""

from __future__ import annotations

from engine.journal.chats import MOST_DETAILED, ChatState
from engine.journal.journal_state import MOST_WARNINGS, JournalState
from tests.hours.run import MOST_GROWTH_BYTES, chat, follower, grown


def test_memory_stays_flat_in_a_long_chat() -> None:
    assert grown("chat", chat, 0.1) < MOST_GROWTH_BYTES


def test_memory_stays_flat_for_a_follower_and_a_console() -> None:
    assert grown("follower", follower, 0.02) < MOST_GROWTH_BYTES


def test_old_turns_of_a_chat_keep_their_texts_alone() -> None:
    state = ChatState(models=["a"])
    for turn in range(MOST_DETAILED + 5):
        state.add([
            {"kind": "chat_question", "text": f"q{turn}"},
            {"kind": "chat_prompt", "model": "a", "text": "p"},
            {"kind": "chat_tokens", "model": "a", "text": f"a{turn}", "pieces": [["a", 0.5]]},
            {"kind": "chat_answer", "model": "a", "text": f"a{turn}", "stopped_by": "end", "seconds": 1.0, "count": 1},
        ])  # fmt: skip
    replies = [exchange.replies["a"] for exchange in state.exchanges]
    assert [reply.text for reply in replies] == [f"a{turn}" for turn in range(MOST_DETAILED + 5)]
    assert [bool(reply.prompt and reply.pieces) for reply in replies] == [False] * 5 + [True] * MOST_DETAILED
    assert len(state.messages("a")) == 2 * (MOST_DETAILED + 5)


def test_the_newest_warnings_are_kept() -> None:
    state = JournalState()
    for number in range(MOST_WARNINGS + 10):
        state.fold({"kind": "warning", "code": "c", "text": str(number), "fix": ""})
    assert [event["text"] for event in state.warnings] == [str(number) for number in range(10, MOST_WARNINGS + 10)]
