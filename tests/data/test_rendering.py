"""What of a row decides the prompt and the targets: tools and their calls, system prompts, parts of turns, ends of
answers. Rendered rows are compared with those that transformers renders for the same conversation in OpenAI's shape, by
the templates that the package `trl` ships."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from engine.commands.data import figures_of
from engine.config.schema.recipe import Model
from engine.data.chat import ChatRenderer
from engine.data.conversations import conversation
from engine.data.end_tokens import end_ids, model_ends, set_model_ends
from engine.data.prepare import PreparedData, prepare_data
from engine.data.records import ChatRecord, Dropped
from engine.data.template_limits import TEMPLATE_ERRORS
from engine.errors import DataError
from engine.model.result_files import end_token_ids
from engine.model.tokenizer import load_tokenizer
from tests.data.conversations import TOOLS, Message, assistant, calling, outcome, user
from tests.data.specs import CHATML, CHATML_MARKED, FORGETFUL, run_spec, tokenizer
from tests.data.test_stock_templates import CONTROL_TOKEN, FOLDER, TEMPLATES, template

Write = Callable[..., str]
needs_trl = pytest.mark.skipif(not FOLDER.is_dir(), reason="trl is not installed")

QUESTION, ANSWER = user("Weather in Oslo?"), assistant("Cold today.")
CALLED = [QUESTION, calling({"city": "Oslo"}), outcome("minus four"), ANSWER]
(TOOL,) = TOOLS
BARE: Any = TOOL["function"]

WAYS_OF_TOOLS: dict[str, Any] = {
    "bare": [BARE],
    "JSON text": json.dumps([BARE]),
    "JSON text of OpenAI's shape": json.dumps(TOOLS),
    "one object": BARE,
    "a list of JSON texts": [json.dumps(BARE)],
    "parameters as JSON text": [{**BARE, "parameters": json.dumps(BARE["parameters"])}],
    "OpenAI's with parameters as JSON text": [
        {"type": "function", "function": {**BARE, "parameters": json.dumps(BARE["parameters"])}}
    ],
    "OpenAI's without a type": [{"function": BARE}],
    "of OpenAI's responses": [{"type": "function", **BARE}],
    "Anthropic's": [
        {"name": BARE["name"], "description": BARE["description"], "input_schema": BARE["parameters"]},
    ],
}


@cache
def stock(name: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer with a stock template and its control tokens."""
    made = tokenizer(template(name))
    made.add_special_tokens({"additional_special_tokens": sorted(set(CONTROL_TOKEN.findall(template(name))))})
    return made


@cache
def renderer(name: str) -> ChatRenderer:
    return ChatRenderer(stock(name), system_prompt=None, learn_all=False)


def rendered(name: str, row: dict[str, Any]) -> list[list[int]] | str:
    """The tokens of each row of a conversation, or why it is dropped."""
    record = conversation(row)
    assert isinstance(record, ChatRecord), record
    rows = renderer(name).render(record)
    if isinstance(rows, Dropped):
        return rows.reason
    return [[] if isinstance(each, Dropped) else each[0] for each in rows.rows]


def served(name: str, messages: list[Message], *, as_text: bool = False) -> str | None:
    """What transformers renders with OpenAI's tools, and arguments as objects or as JSON text; None if the template
    fails, or leaves out the arguments."""
    turns = json.loads(json.dumps(messages))
    for call in (call for turn in turns for call in turn.get("tool_calls", ()) if as_text):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    try:
        text = str(stock(name).apply_chat_template(turns, tools=list(TOOLS), tokenize=False))
    except (*TEMPLATE_ERRORS, jinja2.TemplateError):
        return None
    return text if "Oslo" in text.rpartition(QUESTION["content"])[2] else None


@needs_trl
@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_in_every_shape_give_the_rows_of_openais(name: str) -> None:
    expected = rendered(name, {"messages": CALLED, "tools": TOOLS})
    for way, tools in WAYS_OF_TOOLS.items():
        assert rendered(name, {"messages": CALLED, "tools": tools}) == expected, way
    text = served(name, CALLED) or served(name, CALLED, as_text=True)
    if text is not None and not isinstance(expected, str) and len(expected) == 1:
        written = str(stock(name).decode(expected[0], clean_up_tokenization_spaces=False))
        assert written.rstrip().removesuffix("<eos>").rstrip() == text.rstrip().removesuffix("<eos>").rstrip()


@needs_trl
@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_in_every_shape_give_the_rows_of_an_object(name: str) -> None:
    for given, ways in (
        ({"city": "Oslo"}, ['{"city":"Oslo"}', '{\n "city": "Oslo"}']),
        ({}, ["null", "", "  ", None, "{}"]),
    ):
        asked = {"messages": [QUESTION, calling(given), outcome("minus four"), ANSWER], "tools": TOOLS}
        expected = rendered(name, asked)
        if isinstance(expected, str):
            continue
        for way in ways:
            turns = [QUESTION, calling(way), outcome("minus four"), ANSWER]
            found = rendered(name, {"messages": turns, "tools": TOOLS})
            if served(name, CALLED) is None:  # JSON text stays as it is written where the template takes nothing else
                assert not isinstance(found, str)
                assert all("null" not in str(stock(name).decode(ids)) for ids in found)
                continue
            assert found == expected, way


def test_a_template_that_writes_objects_as_python_does_gets_json_text() -> None:
    text = "{% for m in messages %}<user>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
    text += "{{ c.function.arguments }}{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<user>{% endif %}"
    rows = ChatRenderer(tokenizer(text), system_prompt=None, learn_all=False).render(ChatRecord(CALLED))
    assert not isinstance(rows, Dropped) and not isinstance(rows.rows[0], Dropped)
    assert '{"city": "Oslo"}' in str(tokenizer(text).decode(rows.rows[0][0]))


def test_calls_without_their_wrapping_are_wrapped() -> None:
    calls = [{"name": "get_weather", "arguments": '{"city": "Oslo"}'}]
    expected = [{"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]
    for given in (calls, json.dumps(calls), calls[0]):
        record = conversation({"messages": [QUESTION, assistant("", tool_calls=given)]})
        assert isinstance(record, ChatRecord) and record.messages[1]["tool_calls"] == expected and record.tools_wrapped


@pytest.mark.parametrize("tools", [[{"description": "no name"}], [{"function": {}}], [3], "rain", [["a"]]])
def test_tools_that_are_none_drop_the_row(tools: Any) -> None:
    assert isinstance(conversation({"messages": [QUESTION, ANSWER], "tools": tools}), Dropped)


@pytest.mark.parametrize("tools", [None, "", " ", [], "[]", "null"])
def test_a_row_without_tools_has_none(tools: Any) -> None:
    record = conversation({"messages": [QUESTION, ANSWER], "tools": tools})
    assert isinstance(record, ChatRecord) and record.tools is None


def prepared(
    made: PreTrainedTokenizerFast, path: str, source: dict[str, Any] | None = None, **data: Any
) -> PreparedData:
    return prepare_data(run_spec({"sources": [{"name": "a", "path": path, **(source or {})}], **data}), made)


def marked(made: PreTrainedTokenizerFast, data: PreparedData) -> list[str]:
    """Each row's text, with its targets in brackets."""
    texts = []
    for row in data.train:
        text, inside = "", False
        for token, label in zip(row.input_ids.tolist(), row.labels.tolist(), strict=True):
            learned = label != -100
            text += ("[" if learned else "]") if learned != inside else ""
            text, inside = text + str(made.decode([token])), learned
        texts.append(text + ("]" if inside else ""))
    return texts


TURNS = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Arr."}]


@pytest.mark.parametrize("column", ["system", "system_prompt", "system_message"])
@pytest.mark.parametrize("turns", ["messages", "conversations"])
def test_a_system_prompt_in_a_column_comes_first(column: str, turns: str, jsonl: Write) -> None:
    data = prepared(tokenizer(), jsonl([{column: "Be brief.", turns: TURNS}]), system_prompt="not this")
    assert marked(tokenizer(), data) == ["<system>Be brief.<end><user>Rain?<end><assistant>[Arr.<end>]"]


def test_two_system_prompts_are_one_or_a_reason_to_drop_the_row(jsonl: Write) -> None:
    own = [{"role": "system", "content": "Be brief."}, *TURNS]
    rows = [{"system": text, "messages": own} for text in ("Be brief.", "Be long.")]
    data = prepared(tokenizer(), jsonl(rows))
    assert len(data.train) == 1
    assert data.report.sources[0].dropped == {"the system prompt in a column differs from that of the first turn": 1}
    assert isinstance(conversation({"messages": TURNS, "system": 3.5}), Dropped)


@pytest.mark.parametrize("column", ["context", "persona", "Instructions", "chat_template_kwargs"])
def test_a_column_that_may_be_part_of_the_prompt_and_is_not_read_is_warned_of(column: str, jsonl: Write) -> None:
    data = prepared(tokenizer(), jsonl([{column: "You are a pirate.", "messages": TURNS, "id": 3}]))
    warnings = [line for line in data.report.notices if line.startswith("WARNING")]
    assert len(warnings) == 1 and f"the column {column} is not used" in warnings[0]


def test_a_column_whose_text_is_in_the_conversation_is_no_warning(jsonl: Write) -> None:
    data = prepared(tokenizer(), jsonl([{"prompt": "Rain?", "messages": TURNS}]))
    assert not [line for line in data.report.notices if line.startswith("WARNING")]
    assert any("unused columns: prompt" in line for line in data.report.notices)


PARTS: list[dict[str, Any]] = [
    {"type": "text", "text": "Let me think. ", "train": False},
    {"type": "text", "text": "It is 4."},
]


@pytest.mark.parametrize("text", [None, CHATML, CHATML_MARKED, FORGETFUL])
@pytest.mark.parametrize(
    "answer",
    [
        {"content": PARTS},
        {"content": [{**PARTS[0], "train": 0}, PARTS[1]]},
        {"content": [{"type": "text", "text": "Let me think. ", "weight": 0}, PARTS[1]]},
        {"content": "Let me think. It is 4.", "train_detail": [
            {"begin_offset": 0, "end_offset": 13, "train": False},
            {"begin_offset": 14, "end_offset": 21, "train": True},
        ]},
        {"content": "Let me think. It is 4.", "train_detail": [{"begin_offset": 14, "end_offset": 21, "train": True}]},
    ],
)  # fmt: skip
def test_a_part_that_is_not_trained_is_context(text: str | None, answer: dict[str, Any], jsonl: Write) -> None:
    turns = [TURNS[0], {"role": "assistant", **answer}, TURNS[0], TURNS[1]]
    for loss_on, before in (("completion", "Let me think. ["), ("all", "]Let me think. [")):
        if loss_on == "all" and text == FORGETFUL:
            with pytest.raises(DataError, match="rewrites a finished turn that is excluded from training"):
                prepared(tokenizer(text), jsonl([{"messages": turns}]), loss_on=loss_on)
            return
        data = prepared(tokenizer(text), jsonl([{"messages": turns}]), loss_on=loss_on)
        whole = "\n".join(marked(tokenizer(text), data))
        assert f"{before}It is 4.<end>" in whole, whole
        assert "Arr.<end>" in whole
    count = data.report.sources[0]
    assert count.chat["part_context"] == 1


def test_a_turn_whose_parts_are_all_context_is_context() -> None:
    record = conversation({"messages": [TURNS[0], {"role": "assistant", "content": PARTS[:1]}]})
    assert isinstance(record, ChatRecord) and record.untrained == {1} and not record.context


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"weight": "half"}, {"train": "maybe"}, {"train": [1]}])
def test_a_mark_that_is_neither_yes_nor_no_drops_the_row(mark: dict[str, Any]) -> None:
    dropped = conversation({"messages": [TURNS[0], {**TURNS[1], **mark}]})
    assert isinstance(dropped, Dropped) and f"a turn's {next(iter(mark))} is" in dropped.reason


@pytest.mark.parametrize("mark", [{"weight": "0"}, {"train": "false"}, {"train": "False"}])
def test_marks_may_be_text_as_in_csv_files(mark: dict[str, Any]) -> None:
    record = conversation({"messages": [TURNS[0], {**TURNS[1], **mark}]})
    assert isinstance(record, ChatRecord) and record.untrained == {1}


def test_questions_that_ask_to_be_learned_are_counted(jsonl: Write) -> None:
    data = prepared(tokenizer(), jsonl([{"messages": [{**TURNS[0], "train": True}, TURNS[1]]}]))
    assert data.report.sources[0].chat["asked"] == 1
    assert any("marked for training" in line for line in data.report.lines())


THOUGHT = "Step 1: add."


@pytest.mark.parametrize(
    "keys",
    [
        {"content": "It is 4.", "reasoning_content": [{"type": "text", "text": THOUGHT}]},
        {"content": "It is 4.", "reasoning_content": ["Step 1: ", "add."]},
        {"content": [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": "It is 4."}]},
        {"content": [{"type": "reasoning", "text": THOUGHT}, "It is 4."]},
        {"content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]},
            {"type": "output_text", "text": "It is 4."},
        ]},
    ],
)  # fmt: skip
def test_thinking_in_parts_is_thinking(keys: dict[str, Any]) -> None:
    record = conversation({"messages": [TURNS[0], {"role": "assistant", **keys}]})
    assert isinstance(record, ChatRecord)
    assert record.messages[1] == {"role": "assistant", "content": "It is 4.", "reasoning_content": THOUGHT}


@pytest.mark.parametrize("thinking", [{"a": 1}, 3, [{"type": "image"}], [3]])
def test_thinking_that_is_not_text_drops_the_row(thinking: Any) -> None:
    turn = {"role": "assistant", "content": "It is 4.", "reasoning_content": thinking}
    assert conversation({"messages": [TURNS[0], turn]}) == Dropped("a turn's reasoning_content is not text")


@pytest.mark.parametrize("kind", ["tool_use", "image_url", "input_audio", "refusal"])
def test_a_part_of_another_type_is_named(kind: str) -> None:
    content = [{"type": "text", "text": "a"}, {"type": kind, kind: "x"}]
    for parts in (False, True):
        turns = [{"role": "user", "content": content}, TURNS[1]]
        made = conversation({"messages": turns}, parts=parts)
        assert parts or made == Dropped(f"a turn has a part of the type {kind!r}")


def test_names_of_roles_and_keys_of_turns_are_those_of_the_source(jsonl: Write) -> None:
    row = {"dialog": [{"speaker": "Customer", "text": "Rain?"}, {"speaker": "agent", "text": "Arr.", "skip": 1},
                      {"speaker": "boss", "text": "Hm."}, {"speaker": "agent", "text": "Aye."}]}  # fmt: skip
    source = {
        "roles": {"user": ["customer", "boss"], "assistant": "agent"},
        "columns": {"messages": "dialog", "role": "speaker", "content": "text"},
    }
    data = prepared(tokenizer(), jsonl([row]), source)
    assert marked(tokenizer(), data) == ["<user>Rain?<end><assistant>[Arr.<end>]<user>Hm.<end><assistant>[Aye.<end>]"]
    plain = {"messages": [{"role": "user", "content": "Rain?"}, TURNS[1]]}
    assert prepared(tokenizer(), jsonl([plain], "b.jsonl"), {"roles": {"user": "customer"}}).train
    with pytest.raises(DataError, match="roles has 'a' twice"):
        prepared(tokenizer(), jsonl([plain], "b.jsonl"), {"roles": {"user": "a", "assistant": ["b", "A"]}})
    with pytest.raises(DataError, match="roles is for turns"):
        prepared(tokenizer(), jsonl([{"text": "a"}], "c.jsonl"), {"roles": {"user": "customer"}})


ENDS_WITH_LINE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_loss_on_all_learns_the_templates_text_and_no_second_end(jsonl: Write) -> None:
    made = tokenizer(ENDS_WITH_LINE)
    data = prepared(made, jsonl([{"messages": TURNS}]), loss_on="all")
    (row,) = data.train
    assert row.input_ids.tolist() == made.apply_chat_template(TURNS, return_dict=False)
    assert marked(made, data)[0].endswith("Arr.<eos>\n]")


@needs_trl
@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_on_all_never_learns_two_ends(name: str) -> None:
    rendering = ChatRenderer(stock(name), system_prompt=None, learn_all=True)
    rows = rendering.render(ChatRecord([user("hi"), assistant("yes"), user("more"), assistant("no")]))
    assert not isinstance(rows, Dropped) and not isinstance(rows.rows[0], Dropped)
    text = str(stock(name).decode(rows.rows[0][0], clean_up_tokenization_spaces=False))
    behind = text.rpartition("no")[2]
    ends = [token for token in stock(name)(behind, add_special_tokens=False)["input_ids"] if token in rendering.ends]
    assert len(ends) == 1, text


@pytest.mark.parametrize("column", ["text", "prompt and completion"])
def test_a_rendered_text_gets_no_second_beginning_and_end(column: str, jsonl: Write) -> None:
    made = tokenizer("{{ bos_token }}" + CHATML)
    made.add_special_tokens({"additional_special_tokens": ["<end>"]})
    from tokenizers.processors import TemplateProcessing

    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", int(str(made.bos_token_id)))]
    )
    whole = str(made.apply_chat_template(TURNS, tokenize=False))
    row = {"text": whole}
    if column != "text":
        start, _, rest = whole.partition("Arr.")
        row = {"prompt": start, "completion": "Arr." + rest}
    (found,) = prepared(made, jsonl([row])).train
    text = str(made.decode(found.input_ids))
    assert text.count("<bos>") == 1 and "<eos>" not in text and text.rstrip() == whole.rstrip()
    (plain,) = prepared(made, jsonl([{"text": "Rain."}], "b.jsonl")).train
    assert str(made.decode(plain.input_ids)) == "<bos>Rain.<eos>"


NO_END = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}<assistant>{{ m.content }}{% elif m.role == 'tool' %}"
    "<system>{{ m.content }}{% else %}<user>{{ m.content }}{% endif %}{% endfor -%}"
    "{%- if add_generation_prompt %}<assistant>{% endif -%}"
)
CHAT = [user("Q1"), assistant("A1"), user("Q2"), assistant("CALL"), {"role": "tool", "content": "yes"}, assistant("A3")]


def ids_of(made: PreTrainedTokenizerFast, tokens: list[str]) -> list[int]:
    return [made.get_vocab()[token] for token in tokens]


def test_the_marker_of_the_next_turn_is_learned_where_the_model_stops_at_it(jsonl: Write) -> None:
    made = tokenizer(NO_END)
    set_model_ends(made, ids_of(made, ["<eos>", "<user>", "<system>"]))
    data = prepared(made, jsonl([{"messages": CHAT}]))
    expected = "<user>Q1<assistant>[A1<user>]Q2<assistant>[CALL<system>]yes<assistant>[A3<eos>]"
    assert marked(made, data) == [expected]
    assert data.report.sources[0].chat["stops_at_marker"] == 2
    assert not any("WARNING" in line for line in data.report.lines())


def test_answers_without_an_end_are_warned_of_and_counted(jsonl: Write) -> None:
    made, path = tokenizer(NO_END), jsonl([{"messages": CHAT}])
    data = prepared(made, path)
    assert marked(made, data) == ["<user>Q1<assistant>[A1]<user>Q2<assistant>[CALL]<system>yes<assistant>[A3<eos>]"]
    assert any(line.startswith("WARNING: source a: 2 answers do not end") for line in data.report.lines())
    spec = run_spec({"sources": [{"name": "a", "path": path}]})
    (source,) = figures_of(data, made, spec.recipe).sources
    assert source.ended == pytest.approx(1 / 3) and source.answers == 3
    stopping = tokenizer(NO_END)
    set_model_ends(stopping, ids_of(stopping, ["<user>", "<system>"]))
    (source,) = figures_of(prepared(stopping, path), stopping, spec.recipe).sources
    assert source.ended == 1.0


@needs_trl
def test_glm_learns_the_markers_at_which_it_stops() -> None:
    made = tokenizer(template("glm4moe"))
    marks = sorted({*CONTROL_TOKEN.findall(template("glm4moe")), "<|observation|>", "<|endoftext|>"})
    made.add_special_tokens({"additional_special_tokens": marks})
    set_model_ends(made, ids_of(made, ["<|endoftext|>", "<|user|>", "<|observation|>"]))
    rendering = ChatRenderer(made, system_prompt=None, learn_all=False)
    rows = rendering.render(ChatRecord([user("hi"), assistant("yes"), user("more"), assistant("no")]))
    assert not isinstance(rows, Dropped)
    ended = [each[0][max(k for k, flag in enumerate(each[1]) if flag)] in rendering.ends
             for each in rows.rows if not isinstance(each, Dropped)]  # fmt: skip
    assert all(ended)
    if len(rows.rows) == 1 and not isinstance(rows.rows[0], Dropped):
        ids, flags = rows.rows[0]
        learned = [token for token, flag in zip(ids, flags, strict=True) if flag]
        assert made.convert_tokens_to_ids("<|user|>") in learned


def test_an_end_token_that_is_not_special_counts_everywhere(tmp_path: Path) -> None:
    made = tokenizer(CHATML.replace("<end>", "<|im_end|>"))
    made.add_tokens([AddedToken("<|im_end|>", special=False, normalized=True)])
    (end,) = ids_of(made, ["<|im_end|>"])
    made.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [made.eos_token_id, end]}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = load_tokenizer(Model(id=str(tmp_path)))
    before, after = (each("a<|im_end|>b", add_special_tokens=False)["input_ids"] for each in (made, loaded))
    assert before == after and end in end_ids(loaded) and model_ends(loaded) == [made.eos_token_id, end]
    assert loaded.decode([97, end], skip_special_tokens=True) == loaded.decode([97])
    assert end in end_token_ids(None, loaded)
    rendering = ChatRenderer(loaded, system_prompt=None, learn_all=False)
    rows = rendering.render(ChatRecord([user("hi"), assistant("yes")]))
    assert not isinstance(rows, Dropped) and not isinstance(rows.rows[0], Dropped)
    assert str(loaded.decode(rows.rows[0][0])).rstrip().endswith("yes<|im_end|>")
    other = load_tokenizer(Model(id=str(tmp_path), tokenizer="builtin:bytes"))
    assert model_ends(other) == []
