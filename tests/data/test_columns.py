"""Alpaca's history, tools and system in every format, older ways to write tool calls, and system turns where the chat
template has none: tokens and label mask equal an independent rendering by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.data.prepare import prepare_data
from engine.data.prompts import PromptTokens
from tests.data.specs import run_spec, tokenizer
from tests.data.test_pairs import needs_trl, prepared, rows_of, stock

Write = Callable[..., str]
TOOLS = [{"type": "function", "function": {"name": "rain", "description": "Rain at a place", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}]  # fmt: skip
CALL = {"name": "rain", "arguments": {"place": "Bergen"}}
ASKED, ANSWERED = {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Yes, it rains."}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
RESULT = {"role": "tool", "content": "3 mm"}
SYSTEM = {"role": "system", "content": "Be brief."}
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<user>' + m.role + '\n' + m.content + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<user>assistant\n' }}{% endif %}"
)
LEAVES_OUT = (
    "{% for m in messages if m.role != 'system' %}{{ '<user>' + m.role + '\n' + m.content + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<user>assistant\n' }}{% endif %}"
)


def rendered(made: Any, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    """Tokens of a conversation as transformers renders it."""
    return list(made.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False))


@needs_trl
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
def test_tools_and_system_are_rendered_in_every_format(name: str, jsonl: Write) -> None:
    made = stock(name)
    question, answer = ASKED["content"], ANSWERED["content"]
    more = {"tools": json.dumps(TOOLS), "system": SYSTEM["content"]}
    rows: list[dict[str, Any]] = [
        {"messages": [SYSTEM, ASKED, ANSWERED], "tools": TOOLS},
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}], **more},
        {"instruction": question, "output": answer, **more},
        {"prompt": question, "completion": answer, **more},
        {"prompt": [SYSTEM, ASKED], "completion": [ANSWERED], "functions": TOOLS},
    ]
    for number, row in enumerate(rows):
        ((ids, learned),) = rows_of(made, jsonl([row], f"{number}.jsonl"))
        assert ids == rendered(made, [SYSTEM, ASKED, ANSWERED], TOOLS)[: len(ids)], number
        assert learned.startswith(answer)
        assert "Rain at a place" in str(made.decode(ids))


@needs_trl
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
def test_function_calls_of_sharegpt_and_of_openais_first_api_are_tool_calls(name: str, jsonl: Write) -> None:
    made = stock(name)
    called, as_text = json.dumps(CALL), json.dumps(CALL["arguments"])
    shared = [("human", "Rain?"), ("function_call", called), ("observation", "3 mm"), ("gpt", "Yes, it rains.")]
    first = {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": as_text}}
    rows: list[dict[str, Any]] = [
        {"messages": [ASKED, CALLING, RESULT, ANSWERED], "tools": TOOLS},
        {"conversations": [{"from": role, "value": text} for role, text in shared], "tools": json.dumps(TOOLS)},
        {"messages": [ASKED, first, {**RESULT, "role": "function"}, ANSWERED], "tools": TOOLS},
    ]
    found = [rows_of(made, jsonl([row], f"{number}.jsonl")) for number, row in enumerate(rows)]
    assert found[1] == found[2] == found[0]
    assert "Bergen" in found[0][0][1] and "3 mm" not in found[0][0][1]


def test_alpacas_history_comes_before_the_question_and_its_answers_are_learned(jsonl: Write) -> None:
    row = {"instruction": "And now?", "output": "Sun.", "history": [["Rain?", "Yes."], ["Snow?", "No."]]}
    turns = [("Rain?", "Yes."), ("Snow?", "No."), ("And now?", "Sun.")]
    roles = ("user", "assistant")
    messages = [{"role": roles[place], "content": text} for pair in turns for place, text in enumerate(pair)]
    made = tokenizer()
    ((ids, learned),) = rows_of(made, jsonl([row]))
    assert ids == rendered(made, messages)
    assert learned == "Yes.<end>No.<end>Sun.<end>"
    ((ids, learned),) = rows_of(tokenizer(""), jsonl([row]))
    block = "### Instruction:\n{}\n\n### Response:\n{}"
    assert made.decode(ids) == "\n\n".join(block.format(*turn) for turn in turns) + "<eos>"
    assert learned == "Sun.<eos>"


def test_a_history_of_another_shape_drops_the_row_with_a_reason(jsonl: Write) -> None:
    rows = [{"instruction": "a", "output": "b", "history": "x"}, {"instruction": "a", "output": "b", "history": "[]"}]
    found = prepared(tokenizer(), jsonl(rows)).report.sources[0]
    assert found.dropped == {"history is not a list of questions with their answers": 1}


def test_tools_of_plain_text_drop_the_row_and_its_system_prompt_comes_first(jsonl: Write) -> None:
    pair = {"prompt": "a", "completion": "b"}
    rows: list[dict[str, Any]] = [{**pair, "tools": TOOLS, "system": None}, {**pair, "tools": None, "system": "s"}]
    found = prepared(tokenizer(), jsonl(rows), {"template": "none"})
    assert found.report.sources[0].dropped == {"tools need a chat template": 1}
    assert tokenizer().decode(found.train[0].input_ids) == "s\n\nab<eos>"


@pytest.mark.parametrize("template", [NO_SYSTEM, LEAVES_OUT], ids=["refuses", "leaves out"])
def test_a_system_turn_that_the_template_does_not_take_goes_into_the_first_question(
    template: str, jsonl: Write
) -> None:
    made, path = tokenizer(template), jsonl([{"messages": [SYSTEM, ASKED, ANSWERED]}])
    folded = [{"role": "user", "content": "Be brief.\n\nRain?"}, ANSWERED]
    found = prepared(made, path)
    (row,) = found.train
    assert row.input_ids.tolist() == rendered(made, folded)
    assert made.decode(row.labels[row.labels != -100]) == "Yes, it rains.<end>"
    assert "system turns moved to the start of the first user turn" in "\n".join(found.report.lines())
    asked = PromptTokens("m", made, run_spec({"sources": [{"name": "a", "path": path}]}), plain=False, think=None)
    assert asked.ids([SYSTEM, ASKED]) == rendered(made, folded[:1]) + made.encode("<user>assistant\n")


@needs_trl
def test_gemmas_stock_template_takes_system_turns_so(jsonl: Write) -> None:
    made, path = stock("gemma"), jsonl([{"messages": [SYSTEM, ASKED, ANSWERED]}])
    (row,) = prepared(made, path).train
    folded = rendered(made, [{"role": "user", "content": "Be brief.\n\nRain?"}, ANSWERED])
    assert row.input_ids.tolist() == folded[: len(row.input_ids)]


def test_a_run_of_an_older_version_reads_the_same_rows_as_before_and_says_so(jsonl: Write) -> None:
    made = tokenizer(NO_SYSTEM)
    rows = [{"messages": [SYSTEM, ASKED, ANSWERED]}, {"messages": [ASKED, ANSWERED]}]
    spec = run_spec({"sources": [{"name": "a", "path": jsonl(rows)}]})
    old = prepare_data(spec.model_copy(update={"data_version": 2}), made)
    assert list(old.report.sources[0].dropped.values()) == [1]
    row = {"instruction": "And now?", "output": "Sun.", "history": [["Rain?", "Yes."]], "tools": TOOLS}
    spec = run_spec({"sources": [{"name": "a", "path": jsonl([row], "b.jsonl")}]})
    old = prepare_data(spec.model_copy(update={"data_version": 2}), tokenizer())
    without = rows_of(tokenizer(), jsonl([{key: row[key] for key in ("instruction", "output")}], "c.jsonl"))
    assert np.array_equal(old.train[0].input_ids, without[0][0])
    assert any("ignores history, tools" in notice for notice in old.report.notices)
