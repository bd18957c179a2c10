"""Rows of single answers with labels, for KTO: what they hold, and how prompts are matched with other answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data.order import SampleOrder
from engine.data.preferences import first_partners
from engine.data.prepare import prepare_data
from engine.errors import DataError
from engine.model.tokenizer import load_tokenizer
from tests.data.test_preferences import GOOD, USER, texts
from tests.train.run_helpers import make_spec

CONTEXT = "<user>Hi?<end><assistant>"

ROWS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Hi?", "completion": "Hello.", "label": True},
    "messages": {"prompt": [USER], "completion": [GOOD], "label": True},
    "a conversation": {"messages": [USER, GOOD], "label": True},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}],
        "kto_tag": True,
    },
    "a completion that is a conversation": {"completion": [USER, GOOD], "label": True},
    "a number": {"question": "Hi?", "answer": "Hello.", "label": 1},
    "text": {"prompt": "Hi?", "completion": "Hello.", "label": "True"},
}


def prepared(folder: Path, rows: list[dict[str, Any]], loss: str = "kto", objective: str = "dpo", **data: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    source = {"name": "main", "path": str(path), **data.pop("source", {})}
    preference = {"loss": loss} if objective == "dpo" else {}
    spec = make_spec(
        path,
        method={"objective": objective},
        preference=preference,
        data={"sources": [source], "max_length": 80, "shuffle": False, **data},
    )
    return prepare_data(spec, load_tokenizer(spec.recipe.model))


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_every_form_of_a_row_gives_the_same_answer(tmp_path: Path, row: dict[str, Any]) -> None:
    label = "kto_tag" if "kto_tag" in row else "label"
    other = {**row, label: "False" if row[label] == "True" else type(row[label])(0)}
    data = prepared(tmp_path, [row, other]).train
    assert texts(data) == [(CONTEXT, "Hello.<end>")] * 2
    assert data.desirable.tolist() == [True, False] and not data.in_pairs


def test_pairs_are_two_answers_each(tmp_path: Path) -> None:
    data = prepared(tmp_path, [{"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."}]).train
    assert texts(data) == [(CONTEXT, "Hello.<end>"), (CONTEXT, "No.<end>")]
    assert data.desirable.tolist() == [True, False]


def test_prompts_are_matched_with_the_answer_before_them_in_their_step(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "completion": f"a{n}", "label": n % 2 == 0} for n in range(17)]
    mismatched = prepared(tmp_path, rows).train.mismatched
    found = texts(mismatched)
    wanted = [*np.roll(range(8), 1), *np.roll(range(8, 17), 1)]  # steps of 8, and a last sample that is not alone
    assert found == [(f"<user>p{n}<end><assistant>", f"a{wanted[n]}<end>") for n in range(17)]
    assert mismatched.lengths.tolist() == [len(row.input_ids) for row in mismatched]
    assert mismatched.target_counts.tolist() == [int((row.labels != -100).sum()) for row in mismatched]


def test_shuffled_samples_are_matched_within_the_steps_of_the_first_epoch(tmp_path: Path) -> None:

    weights = np.array([1.0] * 10 + [0.5] * 6)
    order = SampleOrder(weights, seed=5, shuffle=True, batch_size=4).epoch(0)
    partners = first_partners(weights, seed=5, shuffle=True, batch_size=4)
    assert partners[order[0:4]].tolist() == np.roll(order[0:4], 1).tolist()
    assert sorted(partners) == list(range(16)) and not (partners == np.arange(16)).any()


def test_a_mismatched_sequence_is_cut_at_the_longest_length(tmp_path: Path) -> None:
    rows = [
        {"prompt": "x" * 60, "completion": "short", "label": True},
        {"prompt": "x", "completion": "y" * 60, "label": False},
    ]
    data = prepared(tmp_path, rows, max_length=80).train
    assert data.mismatched.lengths.tolist() == [80, data.mismatched.lengths[1]]
    assert [len(row.input_ids) for row in data.mismatched] == data.mismatched.lengths.tolist()
    assert texts(data.mismatched)[0][1].startswith("yyy")


DROPS: dict[str, tuple[dict[str, Any], str]] = {
    "no label": ({"prompt": "a", "completion": "b", "label": None}, "label is missing"),
    "a word": ({"prompt": "a", "completion": "b", "label": "good"}, "label is neither true nor false"),
    "a score": ({"prompt": "a", "completion": "b", "label": 0.7}, "label is neither true nor false"),
    "empty": ({"prompt": "a", "completion": "", "label": True}, "completion is empty"),
    "no prompt": ({"completion": "b", "label": True}, "prompt is missing"),
    "long": ({"prompt": "a", "completion": "b" * 99, "label": True}, "longer than data.max_length"),
    "one turn": ({"messages": [USER], "label": True}, "the conversation has no prompt and answer"),
}


@pytest.mark.parametrize(("row", "reason"), DROPS.values(), ids=DROPS.keys())
def test_what_is_no_answer_with_a_label_is_dropped_and_counted(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, [row])
    assert f"1 x {reason}" in refused.value.found


def test_one_sample_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, [ROWS["texts"]])
    assert "only one sample left" in refused.value.found


def test_labels_of_another_objective_say_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, [ROWS["texts"]], loss="dpo")
    assert "--set preference.loss=kto" in refused.value.fix
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, [ROWS["texts"]], objective="sft", source={"format": "unpaired-preference"})
    assert refused.value.fix == "add --set method.objective=dpo --set preference.loss=kto"
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, [{"prompt": "a", "completion": "b"}])
    assert "single answers with labels" in refused.value.found
    imitated = prepared(tmp_path, [ROWS["texts"]], objective="sft")
    assert "whatever its label" in " ".join(imitated.report.notices)


def test_labels_that_are_uneven_are_told_with_a_weight_that_evens_them(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "completion": f"a{n}", "label": n % 4 != 0} for n in range(8)]
    (notice,) = prepared(tmp_path, rows).report.notices
    assert "6 answers are desirable and 2 undesirable, weighted 3 to 1" in notice
    assert notice.endswith("set preference.undesirable_weight between 2.25 and 3")
    (notice,) = prepared(tmp_path, [{**row, "label": not row["label"]} for row in rows]).report.notices
    assert notice.endswith("set preference.desirable_weight between 3 and 4")
    assert prepared(tmp_path, rows[:6:2] + rows[1:2]).report.notices == []
