"""Conversations through templates that rewrite turns, read messages in a shape of their own, fail or never end."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.data import chat_template, prepare, template_limits
from engine.data.chat import ChatRenderer
from engine.data.prepare import PreparedData, prepare_data
from engine.data.records import ChatRecord, Dropped
from engine.errors import DataError
from tests.data.chat_families import (
    ANALYSIS,
    CLOSED,
    END_OF_TEXT,
    END_OF_TURNS,
    ENDLESS,
    MARKED_END_OF_TEXT,
    MARKED_THINKING,
    NESTED_ARGUMENTS,
    OBJECT_ARGUMENTS,
    PARTS,
    PREFILLED,
    SWITCHED,
    TEXT_ARGUMENTS,
    THINKING,
)
from tests.data.specs import CHATML, FORGETFUL, LLAMA_LIKE, run_spec, tokenizer

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **keys: Any) -> Message:
    return {"role": "assistant", "content": text, **keys}


def call(arguments: Any = None) -> list[dict[str, Any]]:
    function = {"name": "weather"} if arguments is None else {"name": "weather", "arguments": arguments}
    return [{"type": "function", "function": function}]


TWO_TURNS = [user("hi"), assistant("yo"), user("more"), assistant("yes")]
TWO_THOUGHTS = [
    user("hi"),
    assistant("yo", reasoning_content="A"),
    user("more"),
    assistant("<think>\nB\n</think>\n\nyes"),
]


def renderer(template: str) -> ChatRenderer:
    return ChatRenderer(tokenizer(template), system_prompt=None, learn_all=False)


def rows(template: str, messages: list[Message]) -> list[str]:
    """Text of each row of a conversation, with [[ and ]] around what is learned."""
    rendered = renderer(template).render(ChatRecord(messages))
    assert not isinstance(rendered, Dropped), rendered
    texts = []
    for row in rendered.rows:
        assert not isinstance(row, Dropped), row
        groups = groupby(zip(*row, strict=True), key=lambda pair: pair[1])
        parts = [(flag, decoded([token for token, _ in group])) for flag, group in groups]
        texts.append("".join(f"[[{text}]]" if flag else text for flag, text in parts))
    return texts


def decoded(ids: list[int]) -> str:
    return str(tokenizer().decode(ids))


def reason(template: str, messages: list[Message]) -> str:
    result = renderer(template).render(ChatRecord(messages))
    assert isinstance(result, Dropped), result
    return result.reason


@pytest.mark.parametrize("template", [THINKING, MARKED_THINKING])
def test_where_earlier_thinking_is_removed_each_turn_is_learned_with_its_own(template: str) -> None:
    assert rows(template, TWO_THOUGHTS) == [
        "<user>hi<end><assistant>[[<think>\nA\n</think>\n\nyo<end>]]",
        "<user>hi<end><assistant>yo<end><user>more<end><assistant>[[<think>\nB\n</think>\n\nyes<end>]]",
    ]


@pytest.mark.parametrize("template", [END_OF_TEXT, MARKED_END_OF_TEXT])
def test_an_end_of_text_behind_the_end_of_the_last_turn_is_left_out(template: str) -> None:
    whole = "<user>hi<end><assistant>[[yo<end>]]<user>more<end><assistant>[[yes<end>]]"
    assert rows(template, TWO_TURNS) == [whole]
    assert rows(template, TWO_TURNS[:3]) == ["<user>hi<end><assistant>[[yo<end>]]<user>more<end>"]
    every = ChatRenderer(tokenizer(template), system_prompt=None, learn_all=True).render(ChatRecord(TWO_TURNS))
    assert not isinstance(every, Dropped) and not isinstance(every.rows[0], Dropped)
    assert decoded(every.rows[0][0]) == whole.replace("[[", "").replace("]]", "")


def test_an_answer_that_ends_in_another_token_than_earlier_ones_keeps_it() -> None:
    returned = "{% if messages[-1]['role'] == 'assistant' %}<eos>{% else %}<end>{% endif %}"
    assert rows(END_OF_TURNS + returned, TWO_TURNS) == [
        "<user>hi<assistant>[[yo<eos>]]",
        "<user>hi<assistant>yo<end><user>more<assistant>[[yes<eos>]]",
    ]


@pytest.mark.parametrize("template", [THINKING, PREFILLED, SWITCHED, CHATML, LLAMA_LIKE, PARTS])
def test_a_single_turn_is_the_text_that_the_template_gives(template: str) -> None:
    made = renderer(template)
    (text,) = rows(template, TWO_TURNS[:2])
    assert text.replace("[[", "").replace("]]", "") == made.template.render(TWO_TURNS[:2], None)


def test_thinking_that_the_template_removes_from_a_turn_continues_the_prompt() -> None:
    assert rows(PREFILLED, [*TWO_TURNS[:3], TWO_THOUGHTS[3]])[1] == (
        "<user>hi<end><assistant>yo<end><user>more<end><assistant><think>\n[[B\n</think>\n\nyes<end>]]"
    )


def test_an_answer_without_thinking_is_learned_as_the_template_shows_it() -> None:
    assert rows(PREFILLED, TWO_TURNS) == ["<user>hi<end><assistant>[[yo<end>]]<user>more<end><assistant>[[yes<end>]]"]
    result = renderer(PREFILLED).render(ChatRecord(TWO_TURNS))
    assert not isinstance(result, Dropped)
    assert result.facts == {"per_conversation": 1, "unprompted": 2}


def test_an_answer_that_begins_like_the_prompt_goes_on_is_learned_from_its_start() -> None:
    assert rows(PREFILLED, [user("tag"), assistant("<b>bold</b>")]) == ["<user>tag<end><assistant>[[<b>bold</b><end>]]"]


def test_an_answer_follows_the_empty_thinking_of_the_prompt() -> None:
    assert rows(CLOSED, TWO_TURNS) == [
        "<user>hi<end><assistant><think></think>[[yo<end>]]",
        "<user>hi<end><assistant>yo<end><user>more<end><assistant><think></think>[[yes<end>]]",
    ]


def test_a_switch_that_changes_the_system_message_is_not_used_for_an_answer_without_thinking() -> None:
    switched_off = "{% if enable_thinking is defined and not enable_thinking %}"
    announced = switched_off + "<system>no thinking<end>{% endif %}" + SWITCHED
    assert rows(announced, TWO_TURNS[:2]) == ["<user>hi<end><assistant><think></think>[[yo<end>]]"]


def test_the_thinking_switch_that_fits_the_answer_is_used() -> None:
    assert rows(SWITCHED, TWO_TURNS[:2]) == ["<user>hi<end><assistant><think></think>[[yo<end>]]"]
    assert rows(SWITCHED, TWO_THOUGHTS[:2]) == ["<user>hi<end><assistant><think>\n[[A\n</think>yo<end>]]"]


def test_the_final_answer_follows_the_thinking_that_the_template_shows_at_inference() -> None:
    messages = [
        user("rain?"),
        assistant("", reasoning_content="ask", tool_calls=call({})),
        {"role": "tool", "content": "no"},
        assistant("dry"),
    ]
    assert rows(ANALYSIS, messages) == [
        "<user>rain?<end><assistant>[[analysis ask<end><assistant>call weather<end>]]",
        "<user>rain?<end><assistant>analysis ask<end><assistant>call weather<end><user>no<end>"
        "<assistant>[[final dry<end>]]",
    ]


def test_a_template_that_reads_parts_is_given_parts() -> None:
    assert rows(PARTS, TWO_TURNS) == ["<user>hi<end><assistant>[[yo<end>]]<user>more<end><assistant>[[yes<end>]]"]
    assert rows(PARTS, [user("hi"), assistant("")]) == ["<user>hi<end><assistant>[[<end>]]"]


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (TEXT_ARGUMENTS, 'weather {"city": "Oslo"}'),
        (OBJECT_ARGUMENTS, "weather city=Oslo"),
        (NESTED_ARGUMENTS, 'weather {"city": "Oslo"}'),
    ],
)
def test_tool_arguments_have_the_shape_that_the_template_reads(template: str, shown: str, arguments: Any) -> None:
    messages = [user("rain?"), assistant("", tool_calls=call(arguments))]
    assert rows(template, messages) == [f"<user>rain?<end><assistant>[[{shown}<end>]]"]


@pytest.mark.parametrize("template", [TEXT_ARGUMENTS, OBJECT_ARGUMENTS, NESTED_ARGUMENTS])
def test_a_call_without_arguments_is_a_call_with_none(template: str) -> None:
    (text,) = rows(template, [user("rain?"), assistant("", tool_calls=call())])
    assert "weather" in text


def test_a_conversation_whose_tool_call_or_text_is_left_out_is_dropped() -> None:
    assert reason(CHATML, [user("rain?"), assistant("", tool_calls=call({}))]) == (
        "the chat template leaves out a tool call, or its arguments"
    )
    deaf = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}")
    assert reason(deaf, [*TWO_TURNS, {"role": "tool", "content": "the outcome"}]) == (
        "the chat template leaves out text of a turn of the role tool"
    )


@pytest.mark.parametrize("calls", [[{"function": {"name": None, "arguments": {}}}], [1], "weather"])
def test_a_tool_call_without_a_name_drops_the_conversation(calls: Any) -> None:
    assert "a tool call" in reason(CHATML, [user("rain?"), assistant("", tool_calls=calls)])


def test_words_count_as_shown_where_the_template_escapes_the_text() -> None:
    escaping = CHATML.replace("m['content']", "m['content'] | tojson(ensure_ascii=True)")
    (text,) = rows(escaping, [user('née "quoted"\nnext line'), assistant("yo")])
    assert "n\\u00e9e" in text


def test_a_greeting_before_any_question_is_learned_where_the_template_allows_it() -> None:
    greeting = [assistant("welcome"), *TWO_TURNS]
    assert rows(CHATML, greeting)[0].startswith("<user>assistant\n[[welcome<end>]]")
    asking = "{% if messages[0]['role'] != 'user' and messages | length < 2 %}{{ raise_exception('ask') }}{% endif %}"
    assert rows(asking + CHATML, greeting)[0].startswith("<user>assistant\nwelcome<end>")
    assert reason(asking + CHATML, greeting[:1]) == "the chat template rejects it: ask"


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("1 // 0", "ZeroDivisionError"),
        ("'a' + 1", "TypeError"),
        ("'{'.format()", "ValueError"),
        ("[1][messages | length]['x']", None),
        ("range(1000000)", "OverflowError"),
        ("messages.x.y", None),
    ],
)
def test_whatever_the_template_raises_drops_the_conversation(expression: str, error: str | None) -> None:
    found = reason(f"{{% if messages | length > 3 %}}{{{{ {expression} }}}}{{% endif %}}" + CHATML, TWO_TURNS)
    assert found.startswith(f"the chat template fails: {error}" if error else "the chat template rejects it")


def test_a_macro_that_calls_itself_drops_the_conversation() -> None:
    endless_macro = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + CHATML
    assert reason(endless_macro, TWO_TURNS).startswith("the chat template fails: RecursionError")


def test_deeply_nested_arguments_drop_the_conversation() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    assert "RecursionError" in reason(NESTED_ARGUMENTS, [user("a"), assistant("", tool_calls=call({"a": deep}))])


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tenth of a second for a rendering, also in the process that renders."""
    template_limits._place.process.close()
    for module in (chat_template, template_limits):
        monkeypatch.setattr(module, "RENDER_CPU_SECONDS", 0.1)
    yield
    template_limits._place.process.close()


@pytest.mark.usefixtures("short_limit")
def test_a_template_that_does_not_end_is_stopped_and_then_refused() -> None:
    at_tools = "{% if tools %}" + ENDLESS + "{% endif %}" + CHATML
    made = renderer(at_tools)
    stuck = ChatRecord(TWO_TURNS, [{"name": "f"}])
    assert made.render(stuck) == Dropped("the chat template does not end within 0.1 s")
    assert not isinstance(made.render(ChatRecord(TWO_TURNS)), Dropped)
    assert isinstance(made.render(stuck), Dropped)
    with pytest.raises(DataError, match="s of CPU time"):
        made.render(stuck)


ENDLESS_CALLS = {
    "rfind": "{{ ('a'*30000000).rfind('ab' + 'a'*15000000) }}",
    "round": "{{ (tools|length)|round(1000000000,'ceil') }}",
    "sum of lists": "{{ ([[1]*1000]*20000)|sum(start=[])|length }}",
    "equal lists": "{% set a=[0]*3000 %}{% set b=[a]*3000 %}{% set c=[b]*3000 %}"
    "{% set d=[0]*3000 %}{% set e=[d]*3000 %}{% set f=[e]*3000 %}{{ c == f }}",
    "list in lists": "{% set a=[0]*3000 %}{% set b=[a]*3000 %}{% set c=[b]*3000 %}"
    "{% set d=[0]*3000 %}{% set e=[d]*3000 %}{% set f=[e]*3000 %}{{ [f] in [[c]] }}",
}
"""Calls that are computed in C without an end in sight, which no signal handler interrupts."""


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize("name", ENDLESS_CALLS)
def test_a_template_is_stopped_within_a_single_call_that_does_not_end(name: str) -> None:
    at_tools = "{% if tools %}" + ENDLESS_CALLS[name] + "{% endif %}" + CHATML
    made = renderer(at_tools)
    assert made.render(ChatRecord(TWO_TURNS, [{"name": "f"}])) == Dropped("the chat template does not end within 0.1 s")
    assert not isinstance(made.render(ChatRecord(TWO_TURNS)), Dropped)


@pytest.mark.usefixtures("short_limit")
def test_a_template_that_does_not_end_when_it_is_compiled_is_refused() -> None:
    """Jinja computes an expression of constants when it compiles it."""
    with pytest.raises(DataError, match="s of CPU time"):
        renderer("{% if tools %}{{ 1|round(1000000000,'ceil') }}{% endif %}" + CHATML)


@pytest.mark.usefixtures("short_limit")
def test_a_row_on_which_the_template_does_not_end_is_dropped_and_the_others_are_kept(
    jsonl: Callable[..., str],
) -> None:
    at_word = "{% if messages[0].content == 'stop' %}" + ENDLESS_CALLS["equal lists"] + "{% endif %}" + CHATML
    rows = [{"messages": [user(text), assistant("ok")]} for text in ("a", "b", "stop", "c")]
    count = prepared(jsonl(rows), at_word).report.sources[0]
    (reason,) = count.dropped
    assert "does not end within" in reason and count.dropped[reason] == 1
    assert (count.read, count.kept, count.dropped_rows[reason]) == (4, 3, [2])


def test_rows_are_the_same_whether_they_are_rendered_here_or_in_another_process(jsonl: Callable[..., str]) -> None:
    rows = [{"messages": [user("a" * n), assistant("b" * n)]} for n in range(1, 40)]
    made = prepared(jsonl(rows), CHATML).train
    for place in range(len(made)):
        rendered = renderer(CHATML).render(ChatRecord(rows[place]["messages"]))
        assert not isinstance(rendered, Dropped)
        (row,) = rendered.rows
        assert not isinstance(row, Dropped) and made[place].input_ids.tolist() == row[0]


def test_the_process_that_renders_keeps_no_file_and_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import fcntl, os, sys\n"
        "from tests.data.specs import tokenizer\n"
        "from engine.data.chat_template import ChatTemplate\n"
        "lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "ChatTemplate(tokenizer()).render([{'role': 'user', 'content': 'a'}], None)\n"
        "child, = [p for p in os.listdir('/proc') if p.isdigit() and"
        " f'PPid:\\t{os.getpid()}\\n' in open(f'/proc/{p}/status').read()]\n"
        "print(child, flush=True); os.kill(os.getpid(), 9)\n"
    )
    lock = tmp_path / "lock"
    found = subprocess.run([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE, check=False)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(found.stdout)).wait(timeout=60)


@pytest.mark.parametrize("text", [
    "{{ 10 ** (10 ** 10) }}", "{{ 'x' * 10 ** 9 }}", "{{ [1] * 10 ** 9 }}",
    "{{ ('a' * 9000000).replace('a', 'b' * 9000) }}",
    "{% set ns = namespace(n=7) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n > 1 }}",
    "{{ '%1000000000d' % 1 }}",
])  # fmt: skip
def test_a_template_that_asks_for_a_large_number_or_text_is_refused_at_once(text: str) -> None:
    """One call of C that no signal interrupts."""
    said = reason("{% if messages | length == 4 %}" + text + "{% endif %}" + CHATML, TWO_TURNS)
    assert said.startswith("the chat template fails: ") and ("Overflow" in said or "Memory" in said)


def test_what_a_template_filled_memory_with_is_freed_when_it_is_refused() -> None:
    doubling = (
        "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
    )
    before = psutil.Process().memory_info().rss
    for _ in range(2):
        assert "Memory" in reason("{% if messages | length == 4 %}" + doubling + "{% endif %}" + CHATML, TWO_TURNS)
    assert psutil.Process().memory_info().rss - before < template_limits.RENDER_BYTES / 4


def test_a_template_that_writes_more_than_any_row_is_refused() -> None:
    """Within all other limits: what is kept and searched of it takes many times its size."""
    said = reason("{% if messages | length == 4 %}{{ 'x' * 40000000 }}{% endif %}" + CHATML, TWO_TURNS)
    assert said == "the chat template writes more than 32 Mi characters"


def test_a_token_over_the_end_of_the_prompt_is_split_there() -> None:
    from tokenizers import AddedToken

    made = tokenizer(CHATML)
    made.add_tokens([AddedToken("\nx", normalized=False)])
    rendered = ChatRenderer(made, system_prompt=None, learn_all=False).render(ChatRecord([user("hi"), assistant("xy")]))
    assert not isinstance(rendered, Dropped)
    (row,) = rendered.rows
    assert not isinstance(row, Dropped)
    ids, flags = row
    learned = [token for token, flag in zip(ids, flags, strict=True) if flag]
    assert made.decode(learned) == "xy<end>"
    assert made.decode(ids) == made.apply_chat_template([user("hi"), assistant("xy")], tokenize=False)


def prepared(path: str, template: str, **data: Any) -> PreparedData:
    return prepare_data(run_spec({"sources": [{"name": "a", "path": path}], **data}), tokenizer(template))


def test_the_report_says_which_way_was_taken_and_names_the_lines(jsonl: Callable[..., str]) -> None:
    odd = {"messages": [user("hi"), {"content": "no role"}]}
    path = jsonl([{"messages": TWO_TURNS}, odd, {"messages": TWO_TURNS[:2]}])
    data = prepared(path, THINKING)
    (count,) = data.report.sources
    assert (count.read, count.kept, len(data.train)) == (3, 2, 3)
    assert count.chat == {"per_turn": 1, "turn_rows": 2, "per_conversation": 1}
    assert data.train.columns.origins.tolist() == [0, 0, 2]
    lines = data.report.lines()
    assert lines[0].endswith(f"dropped: 1 x a turn has no role ({path}:2)")
    assert "a: rows with one assistant turn: 2" in lines
    assert any(line.startswith("a: conversations rendered as one row per assistant turn") for line in lines)


def test_turns_that_are_too_long_are_dropped_alone(jsonl: Callable[..., str]) -> None:
    data = prepared(jsonl([{"messages": TWO_TURNS}]), FORGETFUL, max_length=30)
    (count,) = data.report.sources
    assert (count.kept, len(data.train), count.dropped_turns) == (1, 1, {"longer than data.max_length": 1})


def test_the_rows_of_one_conversation_stay_on_one_side_of_the_split(jsonl: Callable[..., str]) -> None:
    data = prepared(jsonl([{"messages": TWO_TURNS}] * 20), FORGETFUL, valid_fraction=0.25)
    assert data.validation is not None
    origins = data.train.columns.origins
    assert not set(origins[data.train.documents]) & set(origins[data.validation.documents])


def test_the_fingerprint_changes_only_where_rows_do(jsonl: Callable[..., str]) -> None:
    """The expected fingerprints were recorded with the first, the second and the second version of the rendering."""
    turns = [[user(f"ask {n}"), assistant(f"say {n}"), user("more"), assistant("yes")] for n in range(3)]
    path = jsonl([{"messages": messages} for messages in turns])
    calling = {"messages": [user("a"), assistant("b", tool_calls=call({}))]}
    assert prepared(path, CHATML).fingerprint == "f31f8b421fb2aab002cb5055bddf6a0f"
    changed_by_2 = jsonl([calling, {"messages": turns[0]}], "calls.jsonl")
    assert prepared(changed_by_2, CHATML).fingerprint == "515f348a7b8c7a43854a8cd1c2d79d1a"
    assert prepared(path, END_OF_TEXT).fingerprint != "e89d8b23a6f3c089df3a984bb8ab4e95"


def test_a_cache_entry_of_an_earlier_rendering_is_not_used(
    jsonl: Callable[..., str], monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    path = jsonl([{"messages": TWO_TURNS}])
    (count,) = prepared(path, END_OF_TEXT).report.sources
    assert count.chat == {"per_conversation": 1, "unclosed": 1}
    monkeypatch.setattr(prepare, "CHAT_VERSION", "chat 2")
    prepared(path, END_OF_TEXT)
    assert sum(entry.is_dir() for entry in (own_cache / "tokens").iterdir()) == 2
