"""Rows of preferences: which prompt and which answers they hold, and what becomes of a pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data.order import SampleOrder
from engine.data.preferences import sides_of
from engine.data.prepare import prepare_data
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


def test_texts_without_a_prompt_share_one_up_to_a_white_space() -> None:
    chosen, rejected = "Human: Hi? Assistant: Hello.", "Human: Hi? Assistant: Help."
    assert sides_of({"chosen": chosen, "rejected": rejected}) == ("Human: Hi? Assistant:", " Hello.", " Help.")


DROPS: dict[str, tuple[dict[str, Any], str]] = {
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
    "empty": ({"prompt": "a", "chosen": "", "rejected": "b"}, "completion is empty"),
    "one is long": ({"prompt": "a", "chosen": "b", "rejected": "c" * 90}, "longer than data.max_length (rejected)"),
    "missing": ({"prompt": "a", "chosen": "b", "rejected": None}, "rejected is missing"),
    "numbers": ({"prompt": "a", "chosen": 3.5, "rejected": 4.5}, "chosen is neither text nor a list of messages"),
    "nothing shared": ({"chosen": "b", "rejected": "c"}, "chosen and rejected share no prompt"),
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
    assert "learns from pairs" in refused.value.found
