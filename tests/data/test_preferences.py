"""Rows of preferences: which prompt and which answers they hold, and what becomes of a pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.order import SampleOrder
from engine.data.preferences import Sides, sides_of
from engine.data.prepare import prepare_data
from engine.data.records import Dropped
from engine.data.tokens import TokenData
from engine.errors import DataError
from engine.model.tokenizer import load_tokenizer
from tests.train.run_helpers import make_spec

USER, GOOD, BAD = (
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello."},
    {"role": "assistant", "content": "No."},
)

ROWS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "whole conversations beside their prompt": {"prompt": "Hi?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "LLaMA-Factory's": {
        "conversations": [{"from": "human", "value": "Hi?"}],
        "chosen": {"from": "gpt", "value": "Hello."},
        "rejected": {"from": "gpt", "value": "No."},
    },
    "an instruction": {"instruction": "Hi?", "input": "", "chosen": "Hello.", "rejected": "No."},
    "an instruction with its input": {"instruction": "", "input": "Hi?", "chosen": "Hello.", "rejected": "No."},
    "a question": {"question": "Hi?", "chosen": "Hello.", "rejected": "No."},
    "conversations as JSON": {"chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])},
}


def prepared(tmp_path: Path, rows: list[dict[str, Any]], objective: str = "dpo", **data: Any) -> Any:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    source = {"name": "main", "path": str(path), **data.pop("source", {})}
    spec = make_spec(path, method={"objective": objective}, data={"sources": [source], "max_length": 80, **data})
    return prepare_data(spec, load_tokenizer(spec.recipe.model))


def texts(data: TokenData) -> list[tuple[str, str]]:
    """Of each row: (context, target tokens), as the byte tokenizer writes them."""
    tokenizer = load_tokenizer(make_spec(Path("x")).recipe.model)
    found = []
    for row in data:
        learned = row.labels != -100
        context, answer = row.input_ids[~learned], row.input_ids[learned]
        found.append((str(tokenizer.decode(context)), str(tokenizer.decode(answer))))
    return found


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_every_form_of_a_row_gives_the_same_pair(tmp_path: Path, row: dict[str, Any]) -> None:
    data = prepared(tmp_path, [row]).train
    context = "<user>Hi?<end><assistant>"
    assert data.in_pairs and texts(data) == [(context, "Hello.<end>"), (context, "No.<end>")]


def test_dialogues_without_a_prompt_share_one_up_to_the_last_label_of_an_answer() -> None:
    chosen, rejected = "Human: Hi?\nAssistant: Hello.", "Human: Hi?\nAssistant: Help."
    assert sides_of({"chosen": chosen, "rejected": rejected}) == Sides(
        "Human: Hi?\nAssistant:", " Hello.", " Help.", is_dialogue=True
    )


HUMAN = "\n\nHuman: Is it wet?\n\nAssistant:"

DIALOGUES: dict[str, tuple[str, str, str]] = {
    "answers begin alike": (HUMAN, " I think it is wet.", " I think not."),
    "answers have labels": (HUMAN, " Let me see.\nAnswer: yes", " Let me see.\nAnswer: no"),
    "two rounds": (f"{HUMAN} Yes.\n\nHuman: Sure?\n\nAssistant:", " I am.", " I am not."),
    "Markdown": ("### Instruction:\nAdd.\n\n### Response:", "\n3", "\n4"),
    "rendered": ("<user>Hi?<end><assistant>", "Hello.<end>", "Help.<end>"),
}


@pytest.mark.parametrize("parts", DIALOGUES.values(), ids=DIALOGUES.keys())
def test_the_prompt_of_a_dialogue_ends_with_the_last_turn_that_both_share(
    tmp_path: Path, parts: tuple[str, str, str]
) -> None:
    prompt, *answers = parts
    found = prepared(tmp_path, [{"chosen": prompt + answers[0], "rejected": prompt + answers[1]}])
    ends = ["" if answer.endswith("<end>") else "<eos>" for answer in answers]
    expected = [(prompt, answer + end) for answer, end in zip(answers, ends, strict=True)]
    assert texts(found.train) == expected
    assert any("pairs of whole dialogues" in line for line in found.report.lines())


NO_PROMPTS: dict[str, tuple[str, str]] = {
    "plain answers": ("The capital is Oslo.", "The capital is Bergen."),
    "a label inside a line": ("Human: Hi? Assistant: Hello.", "Human: Hi? Assistant: Help."),
    "no question": ("Assistant: I think so.", "Assistant: I think not."),
    "other questions": ("Human: Hi?\nAssistant: Yes.", "Human: Ho?\nAssistant: No."),
    "answers that go on": (f"{HUMAN} Yes.\n\nHuman: So?\n\nAssistant: a", f"{HUMAN} No.\n\nHuman: So?"),
}


@pytest.mark.parametrize("sides", NO_PROMPTS.values(), ids=NO_PROMPTS.keys())
def test_what_answers_begin_with_is_no_prompt(sides: tuple[str, str]) -> None:
    found = sides_of({"chosen": sides[0], "rejected": sides[1]})
    assert isinstance(found, Dropped) and found.reason.startswith("chosen and rejected ")


@given(st.text(alphabet="ab \n:.", max_size=30), st.text(alphabet="ab \n:.", max_size=30))
def test_answers_that_begin_alike_keep_all_of_their_text(chosen: str, rejected: str) -> None:
    found = sides_of({"prompt": "p", "chosen": chosen, "rejected": rejected})
    assert found == Sides("p", chosen, rejected)
    found = sides_of({"chosen": HUMAN + chosen, "rejected": HUMAN + rejected})
    assert found == Sides(HUMAN, chosen, rejected, is_dialogue=True)


def test_conversations_that_differ_in_a_question_are_no_pair() -> None:
    other = {"role": "user", "content": "Ho?"}
    sides = {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, other, BAD]}
    assert sides_of(sides) == Dropped("chosen and rejected have different questions")


def test_history_and_input_are_part_of_the_prompt(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 2", "history": [["Rain?", "Yes."]], "chosen": "3", "rejected": "4"}
    found = texts(prepared(tmp_path, [row]).train)
    context = "<user>Rain?<end><assistant>Yes.<end><user>Add.\n1 2<end><assistant>"
    assert found == [(context, "3<end>"), (context, "4<end>")]


DROPS: dict[str, tuple[dict[str, Any], str]] = {
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
    "empty": ({"prompt": "a", "chosen": "", "rejected": "b"}, "completion is empty"),
    "one is long": ({"prompt": "a", "chosen": "b", "rejected": "c" * 90}, "longer than data.max_length (rejected)"),
    "missing": ({"prompt": "a", "chosen": "b", "rejected": None}, "rejected is missing"),
    "numbers": ({"prompt": "a", "chosen": 3.5, "rejected": 4.5}, "chosen is neither text nor a list of messages"),
    "nothing shared": ({"chosen": "b", "rejected": "c"}, "chosen and rejected share no prompt"),
    "an input that is not text": ({"prompt": "a", "input": [1], "chosen": "b", "rejected": "c"}, "input or history"),
    "text and messages": (
        {"prompt": "a", "chosen": "b", "rejected": [BAD]},
        "of chosen and rejected, one is text and one a list of messages",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), DROPS.values(), ids=DROPS.keys())
def test_a_pair_is_dropped_as_a_whole_and_counted(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(DataError) as refused:
        prepared(tmp_path / "one", [row])
    assert f"1 x {reason}" in refused.value.found


def test_half_of_a_pair_never_stays(tmp_path: Path) -> None:
    rows = [ROWS["texts"], {"prompt": "a", "chosen": "b", "rejected": "c" * 90}, {**ROWS["texts"], "chosen": "Yes."}]
    found = prepared(tmp_path, rows)
    assert [answer for _, answer in texts(found.train)] == ["Hello.<end>", "No.<end>", "Yes.<end>", "No.<end>"]
    assert found.report.sources[0].kept == 2


def test_held_out_pairs_are_whole(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(20)]
    found = prepared(tmp_path, rows, valid_fraction=0.2)
    for part in (found.train, found.validation):
        answers = [answer for _, answer in texts(part)]
        assert [answer.replace("bad", "good") for answer in answers[1::2]] == answers[0::2]
    assert len(found.validation) == 8


def test_the_order_keeps_pairs_together() -> None:
    order = SampleOrder(10, seed=1, shuffle=True, batch_size=3, epochs=2.0, in_pairs=True)
    steps = [order.step(step) for step in range(1, 8)]
    assert [len(step) for step in steps] == [6, 6, 6, 6, 6, 6, 4]
    whole = np.concatenate(steps)
    assert (whole[0::2] % 2 == 0).all() and (whole[1::2] == whole[0::2] + 1).all()
    assert sorted(whole[:20]) == list(range(20))


def test_preferences_without_their_objective_say_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, [ROWS["texts"]], objective="sft")
    assert "--set method.objective=dpo" in refused.value.fix
    imitated = {"columns": {"prompt": "prompt", "completion": "chosen"}, "format": "prompt-completion"}
    data = prepared(tmp_path, [ROWS["texts"]], objective="sft", source=imitated).train
    assert [answer for _, answer in texts(data)] == ["Hello.<end>"]


def test_answers_alone_are_no_pairs(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, [{"prompt": "a", "completion": "b"}])
    assert "needs pairs" in refused.value.found
