"""Prompts with completions inside the chat template, and answers that are context: tokens and label mask equal an
independent rendering by transformers, through the stock templates that the package `trl` ships."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from engine.config.load import load_run_spec
from engine.data.prepare import PreparedData, prepare_data
from engine.errors import DataError
from tests.data.specs import CHATML_MARKED, FORGETFUL, run_spec, tokenizer
from tests.data.test_stock_templates import CONTROL_TOKEN, FOLDER, template

Write = Callable[..., str]
QUESTION, ANSWER = "Where does it rain?", "In Bergen, née Bjørgvin."
PAIR = {"prompt": QUESTION, "completion": ANSWER}
ASKED = [{"role": "user", "content": QUESTION}]
ANSWERED = [*ASKED, {"role": "assistant", "content": ANSWER}]

STOCK = pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma3", "phi3", "glm4moe", "cohere2"])
needs_trl = pytest.mark.skipif(not FOLDER.is_dir(), reason="trl is not installed")


@cache
def stock(name: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer with a stock template and its control tokens."""
    made = tokenizer(template(name))
    made.add_special_tokens({"additional_special_tokens": sorted(set(CONTROL_TOKEN.findall(template(name))))})
    return made


def prepared(
    made: PreTrainedTokenizerFast, path: str, source: dict[str, Any] | None = None, **data: Any
) -> PreparedData:
    return prepare_data(run_spec({"sources": [{"name": "a", "path": path, **(source or {})}], **data}), made)


def rows_of(made: PreTrainedTokenizerFast, path: str, source: dict[str, Any] | None = None, **data: Any) -> list[Any]:
    """(tokens, text of the target tokens) of each row."""
    rows = prepared(made, path, source, **data).train
    return [(row.input_ids.tolist(), made.decode(row.labels[row.labels != -100])) for row in rows]


def independent(
    made: PreTrainedTokenizerFast, asked: list[Any], answer: str, **variables: Any
) -> tuple[list[int], str]:
    """The inference prompt as transformers renders it, then the answer and the template's own end of it."""
    prompt = str(made.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **variables))
    whole = str(
        made.apply_chat_template([*asked, {"role": "assistant", "content": answer}], tokenize=False, **variables)
    )
    end = next(token for token in CONTROL_TOKEN.findall(whole.rpartition(answer)[2]) or ["<eos>"])
    text = prompt + answer + end
    return made(text, add_special_tokens=False)["input_ids"], answer + end


@needs_trl
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma3"])
def test_prompt_and_completion_are_rendered_as_the_question_and_answer_of_a_chat(name: str, jsonl: Write) -> None:
    made = stock(name)
    ((ids, learned),) = rows_of(made, jsonl([PAIR]))
    expected, target = independent(made, ASKED, ANSWER)
    assert ids[: len(expected)] == expected
    assert not str(made.decode(ids[len(expected) :])).strip()
    assert learned == target


@needs_trl
@STOCK
def test_all_ways_of_writing_a_pair_give_the_rows_of_the_conversation(name: str, jsonl: Write) -> None:
    rows = [
        {"messages": ANSWERED},
        PAIR,
        {"input": QUESTION, "output": ANSWER},
        {"prompt": ASKED, "completion": ANSWERED[1:]},
        {"instruction": QUESTION, "output": ANSWER},
    ]
    made = stock(name)
    found = [rows_of(made, jsonl([row], f"{number}.jsonl")) for number, row in enumerate(rows)]
    assert all(each == found[0] for each in found[1:])
    assert ANSWER in found[0][0][1]


@needs_trl
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
def test_a_row_with_the_templates_markers_stays_as_it_is_with_one_end(name: str, jsonl: Write) -> None:
    made = stock(name)
    prompt = str(made.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True))
    end = CONTROL_TOKEN.findall(str(made.apply_chat_template(ANSWERED, tokenize=False)))[-1]
    path = jsonl([{"prompt": prompt, "completion": ANSWER + end}])
    (row,) = rows_of(made, path)
    assert row == (made(prompt + ANSWER + end, add_special_tokens=False)["input_ids"], ANSWER + end)
    assert prepared(made, path).report.sources[0].chat == {"marked": 1}


def test_none_leaves_pairs_plain_and_the_report_says_which_way_was_taken(jsonl: Write) -> None:
    path, made = jsonl([PAIR]), tokenizer()
    assert rows_of(made, path, {"template": "none"})[0][0] == [*(QUESTION + ANSWER).encode(), made.eos_token_id]
    said = "\n".join(prepared(made, path).report.lines())
    assert 'rendered with the chat template (template = "none" in the source keeps them plain): 1' in said


def test_a_tokenizer_without_a_template_leaves_pairs_plain(jsonl: Write) -> None:
    path = jsonl([PAIR])
    assert rows_of(tokenizer(""), path) == rows_of(tokenizer(""), path, {"template": "none"})


def test_a_conversational_prompt_is_context_with_its_answers(jsonl: Write) -> None:
    row = {
        "prompt": [*ANSWERED, {"role": "user", "content": "And?"}],
        "completion": [{"role": "assistant", "content": "No."}],
    }
    for text in (None, CHATML_MARKED, FORGETFUL):
        ((_, learned),) = rows_of(tokenizer(text), jsonl([row]))
        assert learned.endswith("No.<end>")
        assert ANSWER not in learned


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_an_answer_that_is_marked_as_context_is_not_learned(mark: dict[str, Any], jsonl: Write) -> None:
    turns = [
        ASKED[0],
        {**ANSWERED[1], **mark},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "No."},
    ]
    for text in (None, CHATML_MARKED, FORGETFUL):
        ((ids, learned),) = rows_of(tokenizer(text), jsonl([{"messages": turns}]))
        assert learned.endswith("No.<end>")
        assert ANSWER not in learned
        assert ANSWER in str(tokenizer(text).decode(ids))


def test_a_conversation_without_a_target_is_dropped(jsonl: Write) -> None:
    rows = [{"messages": [ASKED[0], {**ANSWERED[1], "weight": 0}]}, {"messages": ANSWERED}]
    assert prepared(tokenizer(), jsonl(rows)).report.sources[0].dropped == {"no target token": 1}


def test_loss_on_last_learns_the_last_answer_alone(jsonl: Write) -> None:
    turns = [*ANSWERED, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}]
    for text in (None, CHATML_MARKED):
        ((ids, learned),) = rows_of(tokenizer(text), jsonl([{"messages": turns}]), loss_on="last")
        assert learned == "No.<end>"
        assert ids == rows_of(tokenizer(text), jsonl([{"messages": turns}]))[0][0]


@needs_trl
def test_variables_of_the_template_are_given_to_it(jsonl: Write) -> None:
    made, path = stock("qwen3"), jsonl([PAIR])
    shown = prepared(made, path, template_args={"enable_thinking": False})
    prompt = made.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    (row,) = shown.train
    assert str(made.decode(row.input_ids)).startswith(str(prompt) + ANSWER)
    assert shown.fingerprint != prepared(made, path).fingerprint


def test_template_that_does_not_fit_the_format_is_refused(jsonl: Write) -> None:
    for row, wrong in (({"text": "a"}, "chat"), ({"messages": ANSWERED}, "none")):
        with pytest.raises(DataError, match=f'template = "{wrong}"'):
            prepared(tokenizer(), jsonl([row]), {"template": wrong})


def test_a_run_of_an_older_version_keeps_its_meaning_and_says_so(jsonl: Write, tmp_path: Any) -> None:
    path, made = jsonl([PAIR]), tokenizer()
    spec = run_spec({"sources": [{"name": "a", "path": path}]})
    old = prepare_data(spec.model_copy(update={"data_version": 1}), made)
    plain = prepared(made, path, {"template": "none"})
    assert np.array_equal(old.train[0].labels, plain.train[0].labels)
    assert any("older version" in notice for notice in old.report.notices)
    (tmp_path / "run.toml").write_text(
        'name = "x"\n[profile]\nname = "p"\ndevice = {kind = "cpu", memory_gib = 1.0}\n'
        f'[recipe]\nmodel = {{id = "builtin:tiny"}}\ndata = {{sources = [{{name = "a", path = "{path}"}}]}}\n'
    )
    assert load_run_spec(tmp_path / "run.toml").data_version == 1
    assert old.fingerprint == plain.fingerprint
