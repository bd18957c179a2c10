"""Formats are recognised by their columns, rows become records; unclear columns are refused, and broken rows are
dropped with a reason."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import quote_from_bytes

import pytest

from engine.config.schema.data import Source
from engine.data.recognise import recognise
from engine.data.records import ChatRecord, Dropped, PairRecord, TextRecord
from engine.errors import DataError


def record(row: dict[str, Any], *, has_template: bool = True, **keys: Any) -> Any:
    source = Source.model_validate({"name": "s", "path": "x.jsonl", **keys})
    return recognise(list(row), source, has_template=has_template).record(row)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, TextRecord("a")),
        ({"prompt": "a", "completion": "b", "id": 3}, PairRecord("a", "b")),
        ({"question": "a", "answer": "b"}, PairRecord("a", "b")),
        ({"query": "a", "response": "b"}, PairRecord("a", "b")),
        ({"input": "a", "output": "b"}, PairRecord("a", "b")),
    ],
)
def test_formats_are_recognised_by_their_columns(row: dict[str, Any], expected: object) -> None:
    assert record(row, has_template=False) == expected


def test_sharegpt_and_messages_say_the_same() -> None:
    turns = [("system", "s"), ("user", "u"), ("assistant", "a")]
    chat = record({"messages": [{"role": role, "content": text} for role, text in turns]})
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = record({"conversations": [{"from": names[role], "value": text} for role, text in turns]})
    assert isinstance(chat, ChatRecord)
    assert chat.messages == shared.messages == [{"role": role, "content": text} for role, text in turns]


def test_instruction_rows_become_a_conversation_where_there_is_a_template() -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3"}
    assert record(row).messages == [{"role": "user", "content": "add\n1 2"}, {"role": "assistant", "content": "3"}]
    source = Source.model_validate({"name": "s", "path": "x.jsonl"})
    older = recognise(list(row), source, has_template=True, version=4).record(row)
    assert isinstance(older, ChatRecord) and older.messages[0]["content"] == "add\n\n1 2"
    assert record(row, has_template=False) == PairRecord(
        "### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n", "3"
    )
    assert record({**row, "input": ""}, has_template=False).prompt == "### Instruction:\nadd\n\n### Response:\n"


@pytest.mark.parametrize("given", ["", "1 2"])
def test_instruction_rows_can_have_the_prompt_of_stanford_alpaca(given: str) -> None:
    row = {"instruction": "Add", "input": given, "output": "3"}
    plain = record(row, template="alpaca")
    assert isinstance(plain, PairRecord)
    start = "Below is an instruction that describes a task" + (", paired with an input" if given else ". Write")
    assert plain.prompt.startswith(start) and plain.prompt.endswith("\n\n### Response:\n")
    assert ("### Input:\n1 2" in plain.prompt) == bool(given)
    chat = record(row, template="alpaca-chat")
    assert isinstance(chat, ChatRecord) and chat.messages[0]["content"] == plain.prompt
    with pytest.raises(DataError):
        record({"prompt": "a", "completion": "b"}, template="alpaca")


def test_columns_can_be_named() -> None:
    row = {"q": "a", "a": "b", "text": "c"}
    assert record(row, columns={"prompt": "q", "completion": "a"}, template="none") == PairRecord("a", "b")


@pytest.mark.parametrize(
    ("row", "keys", "words"),
    [
        ({"foo": "a", "bar": "b"}, {}, ["foo, bar", "prompt \\+ completion", "messages"]),
        ({"text": "a", "instruction": "b", "output": "c"}, {}, ["text and alpaca"]),
        ({"prompt": "a", "response": "b", "answer": "c"}, {}, ["no known format"]),
        ({"text": "a"}, {"format": "chat"}, ['not format = "chat"']),
        ({"text": "a"}, {"columns": {"text": "nope"}}, ["no such column"]),
        ({"text": "a"}, {"columns": {"txt": "text"}}, ["not a known column"]),
        ({"messages": "a"}, {"format": "image-chat", "template": "none"}, ['template = "none"', "template=auto"]),
        ({"image": "a", "prompt": "b", "label": 1}, {"format": "image-unpaired-preference"}, ["+ label, with image"]),
    ],
)
def test_unclear_columns_are_refused(row: dict[str, Any], keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        record(row, **keys)
    for word in words:
        assert word.replace("\\", "") in caught.value.render()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": None}, "completion is missing"),
        ({"prompt": 3.5, "completion": "b"}, "prompt is not text"),
        ({"messages": []}, "the conversation is empty"),
        ({"messages": "hello"}, "the conversation is not a list of turns"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "a turn has the role 'wizard'"),
        ({"messages": [{"content": "x"}]}, "a turn has no role"),
        ({"messages": [{"role": "user", "content": None}]}, "a turn has no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a turn has a part of the type 'image'"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": True}]},
            "a turn's tool_calls is not a list of calls",
        ),
        ({"messages": ["hi"]}, "a turn is not an object with role and content"),
        ({"instruction": "a", "output": None}, "output is missing"),
    ],
)
def test_broken_rows_are_dropped_with_their_reason(row: dict[str, Any], reason: str) -> None:
    assert record(row) == Dropped(reason)


def test_text_parts_are_joined_and_nulls_of_arrow_vanish() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [1]},
    ]
    assert record({"messages": turns}).messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [1]},
    ]


IMAGE = {"image": "1.png"}
ASKED, ANSWERED = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": [ASKED, ANSWERED]}, "image-chat"),
        ({"question": "u", "answer": "a"}, "image-chat"),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, "image-chat"),
        ({"conversations": [ASKED], "chosen": ANSWERED, "rejected": {**ANSWERED, "content": "x"}}, "image-preference"),
        ({"prompt": "u", "completion": "a", "kto_tag": True}, "image-unpaired-preference"),
    ],
)
def test_system_prompt_and_tools_are_read_beside_images(row: dict[str, Any], form: str) -> None:
    given = {**IMAGE, **row, "system": "s", "tools": [{"name": "look"}]}
    made = record(given, format=form)
    made = getattr(made, "chosen", getattr(made, "record", made))
    parts = [{"type": "image"}, {"type": "text", "text": "u"}]
    assert made.messages == [{"role": "system", "content": "s"}, {**ASKED, "content": parts}, ANSWERED]
    assert made.tools == [{"type": "function", "function": {"name": "look"}}] and [
        image.path for image in made.images
    ] == ["1.png"]


def test_a_prompt_of_preferences_about_images_must_be_there() -> None:
    assert record({**IMAGE, "completion": "a", "label": 1}, format="image-unpaired-preference") == Dropped(
        "prompt is missing"
    )
    odd = {**IMAGE, "prompt": 0.5, "completion": "a", "label": 1}
    assert record(odd, format="image-unpaired-preference") == Dropped("a turn's content is not text")


PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(60))
BASE64 = base64.b64encode(PNG).decode()

WAYS_OF_IMAGES: dict[str, Any] = {
    "OpenAI's data URL": {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{BASE64}", "detail": "low"},
    },
    "a data URL as text": {"type": "image_url", "image_url": f"data:image/png;base64,{BASE64}"},
    "of OpenAI's responses": {"type": "input_image", "image_url": f"data:image/png;base64,{BASE64}"},
    "Anthropic's block": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
    "base64 text": {"type": "image", "image": BASE64},
    "base64 text in lines": {"type": "image", "image": {"bytes": base64.encodebytes(PNG).decode()}},
    "base64 text for URLs": {"type": "image", "base64": base64.urlsafe_b64encode(PNG).decode().rstrip("=")},
    "a data URL of bytes": {"type": "image", "image": "data:image/png," + quote_from_bytes(PNG)},
}


@pytest.mark.parametrize("part", WAYS_OF_IMAGES.values(), ids=WAYS_OF_IMAGES.keys())
def test_images_may_be_data_urls_base64_and_source_blocks(part: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": [part, {"type": "input_text", "text": "u"}]}, ANSWERED]
    made = record({"messages": turns}, format="image-chat")
    assert [image.data for image in made.images] == [PNG]
    assert made.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "u"}]
    value = part.get("image") or part.get("image_url") or part.get("source") or part
    beside = record({"image": value, "messages": [ASKED, ANSWERED]}, format="image-chat")
    assert [image.data for image in beside.images] == [PNG]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/1.png"}}, "an image is a web address"),
        ({"type": "image", "source": {"type": "url", "url": "http://example.org/1.png"}}, "an image is a web address"),
        ({"type": "image", "source": {"type": "base64", "data": "no base64!"}}, "the text of an image is not base64"),
        ({"type": "image", "source": {"type": "file", "file_id": "f1"}}, "an image is neither a path nor the bytes"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,??"}}, "the text of an image is not base64"),
        ({"type": "document", "source": {"data": "x"}}, "a turn has a part of the type 'document'"),
    ],
)
def test_an_image_that_cannot_be_read_drops_the_row_with_its_own_reason(part: dict[str, Any], reason: str) -> None:
    turns = [{"role": "user", "content": [part, {"type": "text", "text": "u"}]}, ANSWERED]
    made = record({"messages": turns}, format="image-chat")
    assert isinstance(made, Dropped) and made.reason.startswith(reason)


def test_a_long_path_is_a_path() -> None:
    name = "images/" * 12 + "1.png"
    (image,) = record({"image": name, "messages": [ASKED, ANSWERED]}, format="image-chat").images
    assert image.path == name
