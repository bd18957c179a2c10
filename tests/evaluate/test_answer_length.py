"""Answers of models with a table of positions end where it ends; those of rotary models do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import UsageError
from engine.evaluate.run import score_model
from tests.model.samples import write_model
from tests.train.run_helpers import make_spec, new_run, of_kind, train, write_samples

POSITIONS = 64


def settings(folder: Path, family: str) -> dict[str, Any]:
    positions = {"n_positions": POSITIONS} if family == "gpt2" else {"max_position_embeddings": POSITIONS}
    return {
        "model": {"id": str(write_model(folder / family, family, **positions)), "init": "pretrained"},
        "data": {"max_length": POSITIONS, "valid_fraction": 0.2},
        "eval": {"samples": 2},
        "generate": {"max_new_tokens": POSITIONS},
        "train": {"max_steps": 1},
    }


@pytest.mark.parametrize(("family", "cut"), [("gpt2", True), ("llama", False)])
def test_a_run_and_a_score_generate_no_further_than_the_positions(tmp_path: Path, family: str, cut: bool) -> None:
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), device="cpu", **settings(tmp_path, family))
    code, events = train(new_run(tmp_path / "runs", spec))
    assert code == 0, events[-1]
    texts = [event["text"] for event in of_kind(events, "warning") if event["code"] == "short_answers"]
    assert len(texts) == cut
    assert all("the model has 64 positions and the longest prompt takes" in text for text in texts)
    said: list[str] = []
    assert score_model(spec, said.append).samples
    assert any(text in said for text in texts) == cut


def test_data_beyond_a_table_of_positions_are_not_scored(tmp_path: Path) -> None:
    tables = settings(tmp_path, "gpt2") | {"data": {"max_length": 200, "valid_fraction": 0.2}}
    spec = make_spec(write_samples(tmp_path / "samples.jsonl", longest=180), device="cpu", **tables)
    with pytest.raises(UsageError, match=r"data\.max_length = 200 exceeds the 64 positions"):
        score_model(spec, lambda text: None)
