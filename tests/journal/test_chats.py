"""What a chat's events say, and the rows that are made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import DataError
from engine.journal.chats import (
    ChatInbox,
    ChatState,
    append_rows,
    conversations,
    create_chat,
    is_answering,
    list_chats,
    preference,
    read_chat,
    send_request,
)


def chat_of(*models: str, plain: tuple[str, ...] = ()) -> ChatState:
    state = ChatState()
    ready = {"models": list(models), "settings": {"temperature": 0.0}, "plain": list(plain), "system": "Be short."}
    state.add([{"kind": "chat_started"}, {"kind": "chat_ready", **ready}])
    return state


def asked(question: str, *answers: tuple[str, str], again: bool = False) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"kind": "chat_question", "text": question, "images": [], "again": again}]
    for model, text in answers:
        found += [
            {"kind": "chat_prompt", "model": model, "text": f"<user>{question}", "tokens": 3},
            {"kind": "chat_tokens", "model": model, "text": text, "pieces": [[text, 0.5], "junk", [1, 2]]},
            {"kind": "chat_answer", "model": model, "text": text, "stopped_by": "end", "seconds": 1.0, "count": 1},
        ]
    return [*found, {"kind": "chat_answered"}]


def test_answers_are_read_by_model_undone_and_asked_for_again() -> None:
    state = chat_of("a", "b")
    state.add(asked("one", ("a", "A1"), ("b", "B1")))
    state.add(asked("two", ("a", "A2"), ("b", "B2")))
    assert state.status == "ready" and state.exchanges[1].replies["b"].pieces == [("B2", 0.5)]
    state.add(asked("", ("a", "A3"), ("b", "B3"), again=True))
    assert state.exchanges[1].question == "two" and state.exchanges[1].earlier[0]["a"].text == "A2"
    assert state.draws == 3
    state.add([{"kind": "chat_undone"}])
    assert [turn["content"] for turn in state.messages("a")] == ["Be short.", "one", "A1"]


def test_conversations_and_preferences_are_rows_of_their_formats() -> None:
    state = chat_of("a", "b")
    state.add([*asked("one", ("a", "A1"), ("b", "B1")), *asked("two", ("a", "A2"), ("b", "B2"))])
    assert [row["messages"][-1]["content"] for row in conversations(state)] == ["A2", "B2"]
    row = preference(state, "A2", "B2")
    assert [turn["content"] for turn in row["prompt"]] == ["Be short.", "one", "A1", "two"]
    assert row["chosen"] == [{"role": "assistant", "content": "A2"}] and row["rejected"][0]["content"] == "B2"
    plain = chat_of("a", plain=("a",))
    plain.add(asked("one", ("a", "A1")))
    assert preference(plain, "A1", "x") == {"prompt": "one", "chosen": "A1", "rejected": "x"}


def test_rows_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file"):
        append_rows(tmp_path / "file" / "rows.jsonl", [{}])
    assert append_rows(tmp_path / "new" / "rows.jsonl", [{"prompt": "é"}]) == 1
    assert json.loads((tmp_path / "new" / "rows.jsonl").read_text("utf-8")) == {"prompt": "é"}


def test_requests_come_in_order_and_a_stop_comes_first(tmp_path: Path) -> None:
    chat = create_chat(tmp_path, {"targets": ["x"]})
    assert list_chats(tmp_path) == [chat] and not is_answering(chat)
    for name in ("ask", "undo", "stop"):
        send_request(chat, name)
    (chat.control / "00-junk.json").write_text("{")
    inbox = ChatInbox(chat)
    assert inbox.must_stop()
    assert [inbox.next() for _ in range(3)] == [{"request": "ask"}, {"request": "undo"}, None]
    assert not inbox.must_stop() and not list(chat.control.iterdir())
    with pytest.raises(ValueError, match="dance"):
        send_request(chat, "dance")


def test_a_chat_whose_process_was_killed_has_ended(tmp_path: Path) -> None:
    chat = create_chat(tmp_path, {"targets": ["x"]})
    lines = [{"seq": number, "time": "", "stage": "", "rank": 0, **event} for number, event in enumerate(
        [{"kind": "chat_ready", "models": ["a"], "settings": {}}, *asked("one", ("a", "A1"))], 1)]  # fmt: skip
    chat.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    state = read_chat(chat)
    assert state.status == "ended" and state.exchanges[0].replies["a"].text == "A1"
