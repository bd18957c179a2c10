"""Conversations through real templates: exactly the assistant's tokens are learned."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from engine.data.chat import ChatRenderer, TokenRow
from engine.data.chat_template import ChatTemplate
from engine.data.records import ChatRecord, Dropped
from engine.errors import DataError
from tests.data.specs import CHATML, CHATML_MARKED, FORGETFUL, LLAMA_LIKE, PLAIN, tokenizer

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hallo née"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "yes"},
]


def one_row(renderer: ChatRenderer, turns: list[dict[str, Any]]) -> TokenRow:
    """The row of a conversation that is one row."""
    rendered = renderer.render(ChatRecord(turns))
    assert not isinstance(rendered, Dropped), rendered
    (row,) = rendered.rows
    assert not isinstance(row, Dropped), row
    return row


def learned(template: str | None, turns: list[dict[str, Any]] = TURNS, **settings: Any) -> tuple[str, list[str]]:
    """The whole text of a conversation, and a list of the stretches of it that are learned."""
    made = tokenizer(template)
    renderer = ChatRenderer(made, **{"system_prompt": None, "learn_all": False, **settings})
    ids, flags = one_row(renderer, turns)
    stretches = [
        str(made.decode([token for token, _ in group]))
        for flag, group in groupby(zip(ids, flags, strict=True), key=lambda pair: pair[1])
        if flag
    ]
    return str(made.decode(ids)), stretches


@pytest.mark.parametrize("template", [None, CHATML, CHATML_MARKED, LLAMA_LIKE])
def test_each_answer_is_learned_with_its_end_mark_and_nothing_else(template: str | None) -> None:
    assert learned(template)[1] == ["hallo née<end>", "yes<end>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LLAMA_LIKE])
def test_the_tokens_are_those_of_the_template(template: str) -> None:
    made = tokenizer(template)
    ids, _ = one_row(ChatRenderer(made, system_prompt=None, learn_all=False), TURNS)
    assert ids == made.apply_chat_template(TURNS, tokenize=True, return_dict=False)


def test_our_spans_agree_with_the_mask_of_transformers() -> None:
    made = tokenizer(CHATML_MARKED)
    theirs: Any = made.apply_chat_template(TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    _, flags = one_row(ChatRenderer(made, system_prompt=None, learn_all=False), TURNS)
    assert [int(flag) for flag in flags] == theirs["assistant_masks"]


def test_a_template_without_end_marks_gets_end_of_sequence_behind_the_last_answer() -> None:
    text, stretches = learned(PLAIN, TURNS[:2])
    assert text.endswith("hallo née\n<eos>")
    assert stretches == ["hallo née\n<eos>"]


def test_beginning_of_sequence_is_not_doubled() -> None:
    assert learned(LLAMA_LIKE)[0].count("<bos>") == 1


def test_a_system_prompt_is_added_only_where_there_is_none() -> None:
    assert learned(CHATML, system_prompt="be brief")[0].startswith("<user>system\nbe brief<end>")
    own = [{"role": "system", "content": "own"}, *TURNS]
    assert "be brief" not in learned(CHATML, own, system_prompt="be brief")[0]


def test_loss_on_all_learns_every_token() -> None:
    text, stretches = learned(CHATML, learn_all=True)
    assert stretches == [text]


def test_tool_turns_are_given_and_not_learned() -> None:
    turns = [*TURNS[:2], {"role": "tool", "content": "42"}, {"role": "assistant", "content": "it is 42"}]
    assert learned(CHATML, turns)[1] == ["hallo née<end>", "it is 42<end>"]


def test_a_template_that_rewrites_earlier_turns_gives_one_row_per_assistant_turn() -> None:
    assert learned(FORGETFUL, TURNS[:2])[1] == ["hmm hallo née<end>"]
    rendered = ChatRenderer(tokenizer(FORGETFUL), system_prompt=None, learn_all=False).render(ChatRecord(TURNS))
    assert not isinstance(rendered, Dropped)
    assert len(rendered.rows) == 2


def test_a_conversation_that_the_template_refuses_is_dropped_with_its_words() -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
    renderer = ChatRenderer(tokenizer(template), system_prompt=None, learn_all=False)
    assert renderer.render(ChatRecord(TURNS[1:])) == Dropped("the chat template rejects it: user first")


@pytest.mark.parametrize(
    ("template", "refuses"),
    [
        (CHATML, False),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('Nein.') }}{% endif %}" + CHATML, True),
        ("{{ raise_exception('Only the user and the system may speak') }}", False),
    ],
)
def test_whether_a_template_refuses_system_turns_is_tried(template: str, refuses: bool) -> None:
    """Whatever words it refuses them in."""
    assert ChatTemplate(tokenizer(template)).refuses_system() is refuses


def test_no_template_is_an_error_with_the_fix() -> None:
    with pytest.raises(DataError, match="no chat template"):
        ChatRenderer(tokenizer(""), system_prompt=None, learn_all=False)


@pytest.mark.parametrize(
    ("template", "left_out"), [(CHATML, 1), ("{{ tools | tojson if tools else '' }}" + CHATML, 0)], ids=["out", "in"]
)
def test_tools_that_a_template_does_not_write_are_counted(template: str, left_out: int) -> None:
    rendered = ChatRenderer(tokenizer(template), system_prompt=None, learn_all=False).render(
        ChatRecord(TURNS, [{"type": "function", "function": {"name": "f", "parameters": {}}}])
    )
    assert not isinstance(rendered, Dropped) and rendered.facts["tools_left_out"] == left_out
