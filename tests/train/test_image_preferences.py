"""Preferences about images: both sides of a pair have the row's images, whatever the split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.budget.advise.plan import make_plan
from engine.config.schema.run import RunSpec
from engine.data.prepare import prepare_data
from engine.model.tokenizer import load_image_processor, load_tokenizer
from tests.present import present
from tests.train.image_cases import image_spec
from tests.train.run_helpers import new_run, of_kind, train
from tests.train.test_preferences import SGD, one_step

LORA = {"kind": "lora", "rank": 4, "objective": "dpo"}


def spec_of(folder: Path, rows: str = "turns", method: dict[str, Any] = LORA, **tables: Any) -> RunSpec:
    """A run on pairs about drawn images. `rows`: with the image in the user's turn, or beside plain texts."""
    image_spec(folder)
    images = sorted((folder / "data").rglob("*.png"))[:6]
    with (folder / "pairs.jsonl").open("w") as file:
        for number, image in enumerate(images):
            asked: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
            asked = asked if rows == "turns" else "<image>what?"
            row = {"prompt": asked, "chosen": f"a box {number}", "rejected": f"no {number}", "image": str(image)}
            file.write(json.dumps(row) + "\n")
    source = {"name": "main", "path": str(folder / "pairs.jsonl"), "format": "image-preference"}
    return image_spec(folder, method=method, data={"sources": [source]}, **tables)


@pytest.mark.parametrize("rows", ["turns", "text"])
def test_both_sides_have_the_images_of_their_row(rows: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, rows)
    tokenizer = load_tokenizer(spec.recipe.model)
    data = prepare_data(spec, tokenizer, load_image_processor(spec, tokenizer)).train
    assert len(data) == 12
    patches = present(data.patches)
    assert (patches[0::2] == patches[1::2]).all() and patches.min() > 0


def test_no_split_changes_the_gradient(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, train=SGD)
    whole, together, _ = one_step(tmp_path / "whole", spec, 100)
    weights, outcome, _ = one_step(tmp_path / "one", spec, 0.5)
    assert outcome.micro_batches > together.micro_batches
    assert outcome.loss == pytest.approx(together.loss, rel=1e-6)
    assert torch.allclose(weights, whole, atol=2e-6)


@pytest.mark.parametrize("method", [LORA, {"kind": "full", "objective": "dpo"}], ids=["lora", "full"])
def test_a_run_keeps_to_its_plan(tmp_path: Path, method: dict[str, Any]) -> None:
    """In full fine-tuning the reference is computed before the first step."""
    spec = spec_of(tmp_path, method=method, train={"batch_size": 3, "micro_batch": 2, "max_steps": 2})
    code, events = train(new_run(tmp_path / "runs", spec))
    peak_bytes = max(step["peak_bytes"] for step in of_kind(events, "step"))
    assert code == 0 and np.isfinite([step["rewards_margin"] for step in of_kind(events, "step")]).all()
    assert make_plan(spec, longest=256).peak_bytes >= peak_bytes
