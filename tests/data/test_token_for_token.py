"""The same rows in every kind of file become the tokens that a plain reader and transformers make of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.data.prepare import prepare_data
from engine.data.tokens import IGNORED
from tests.data.specs import run_spec, tokenizer
from tests.data.test_second_reader import JSON_KINDS, TABLE_KINDS, quick, texts, values, written

KINDS = [*JSON_KINDS, *TABLE_KINDS, "csv"]

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}:"
    "{% for key, value in tool['function']['parameters']['properties'] | dictsort %}{{ key }} {{ value | tojson }};"
    "{% endfor %}{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "[{{ call['function']['name'] }}{% for key, value in call['function']['arguments'] | dictsort %} "
    "{{ key }}={{ value | tojson }}{% endfor %}]{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Shows each value of arguments and tools; keys are sorted, as those of a table have the order of the table."""

some = texts.filter(bool)
STORED = {"day": st.dates().map(str), "n": st.integers(-(2**60), 2**60), "x": st.floats(allow_nan=False),
          "many": st.lists(some, max_size=2)}  # fmt: skip
"""Values that a column of a table can have; a key is left out of some rows, and null in none."""


def conversations(arguments: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Rows with one call and one tool, whose keys differ from row to row."""
    types = st.sampled_from(["string", "number"]).map(lambda name: {"type": name})
    properties = st.fixed_dictionaries({"city": types}, optional={"day": types, "n": types})
    row = st.builds(_conversation, texts, texts, arguments, properties)
    return st.lists(row, min_size=1, max_size=4)


def _conversation(question: str, answer: str, arguments: Any, properties: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "look", "description": "d", "parameters": parameters}}
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, "tool_calls": [call]}]
    return {"messages": turns, "tools": [tool]}


def tokens(path: Path, chat_template: str | None, **keys: Any) -> list[tuple[list[int], list[int]]]:
    """Return all tokens, and those that are learned, of each row."""
    source = {"name": "s", "path": str(path), **keys}
    spec = run_spec({"sources": [source], "max_length": 4096, "packing": False})
    train = prepare_data(spec, tokenizer(chat_template)).train
    return [(sample.input_ids.tolist(), sample.input_ids[sample.labels != IGNORED].tolist()) for sample in train]


def rendered(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The same with transformers alone."""
    made, turns = tokenizer(TEMPLATE), row["messages"]
    options = {"tools": row["tools"], "tokenize": True, "return_dict": False}
    whole: Any = made.apply_chat_template(turns, **options)
    asked: Any = made.apply_chat_template(turns[:-1], add_generation_prompt=True, **options)
    return list(whole), list(whole[len(asked) :])


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_learned_as_it_is_in_the_file(kind: str) -> None:
    free = st.dictionaries(st.sampled_from(["city", "day", "n", "Z"]), values, max_size=3)
    is_table = kind in TABLE_KINDS
    arguments = st.fixed_dictionaries({"city": some}, optional=STORED) if is_table else free

    @settings(quick, max_examples=6)
    @given(rows=conversations(arguments))
    def check(rows: list[dict[str, Any]]) -> None:
        cells = [{name: json.dumps(value) for name, value in row.items()} for row in rows] if kind == "csv" else rows
        with tempfile.TemporaryDirectory() as folder:
            assert tokens(written(Path(folder), kind, cells), TEMPLATE) == [rendered(row) for row in rows]

    check()


ANSWERS = ["2021-03-05", "007", "1.10", "NA", "x\u2028y", "a\r\nb", "2021-03-05T10:00:00Z", 'say "no"', " 1e5 "]


@pytest.mark.parametrize("kind", KINDS)
@settings(quick, max_examples=5)
@example(rows=[{"prompt": f"p{number}", "completion": answer} for number, answer in enumerate(ANSWERS)])
@given(rows=st.lists(st.fixed_dictionaries({"prompt": some, "completion": some}), min_size=1, max_size=4))
def test_an_answer_is_learned_as_it_is_in_the_file(kind: str, rows: list[dict[str, Any]]) -> None:
    made = tokenizer()
    wanted = [[*made(row["completion"], add_special_tokens=False)["input_ids"], made.eos_token_id] for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        found = tokens(written(Path(folder), kind, rows), None, template="none")
    assert [learned for _, learned in found] == wanted
