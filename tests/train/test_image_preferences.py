"""Preferences about images: both sides of a pair have the row's images, an answer with a label those of its prompt,
whatever the split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config.schema.run import RunSpec
from engine.data.prepare import prepare_data
from engine.data.tokens import TokenData
from engine.model.tokenizer import load_image_processor, load_tokenizer
from tests.present import present
from tests.train.image_cases import image_spec
from tests.train.run_helpers import new_run, of_kind, train
from tests.train.test_preferences import SGD, one_step
from tests.train.test_unpaired_preferences import three_steps

LORA = {"kind": "lora", "rank": 4, "objective": "dpo"}
FULL = {"kind": "full", "objective": "dpo"}


def spec_of(
    folder: Path, rows: str = "turns", method: dict[str, Any] = LORA, loss: str = "dpo", **tables: Any
) -> RunSpec:
    """A run on preferences about drawn images. `rows`: with the image in the user's turn, or beside plain texts, or,
    for kto, "pairs"."""
    image_spec(folder)
    images = sorted((folder / "data").rglob("*.png"))[:6]
    paired = loss != "kto" or rows == "pairs"
    with (folder / "rows.jsonl").open("w") as file:
        for number, image in enumerate(images):
            asked: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
            asked = asked if rows == "turns" else "<image>what?"
            pair = {"chosen": f"a box {number}", "rejected": f"no {number}"}
            answer = {"completion": f"a box {number}", "label": number % 2 == 0}
            file.write(json.dumps({"prompt": asked, "image": str(image), **(pair if paired else answer)}) + "\n")
    named = "image-preference" if paired else "image-unpaired-preference"
    source = {"name": "main", "path": str(folder / "rows.jsonl"), "format": named}
    return image_spec(folder, method=method, preference={"loss": loss}, data={"sources": [source]}, **tables)


def data_of(spec: RunSpec) -> TokenData:
    tokenizer = load_tokenizer(spec.recipe.model)
    return prepare_data(spec, tokenizer, load_image_processor(spec, tokenizer)).train


@pytest.mark.parametrize("rows", ["turns", "text"])
def test_both_sides_have_the_images_of_their_row(rows: str, tmp_path: Path) -> None:
    data = data_of(spec_of(tmp_path, rows))
    assert len(data) == 12
    patches = present(data.patches)
    assert (patches[0::2] == patches[1::2]).all() and patches.min() > 0


@pytest.mark.parametrize(("rows", "count"), [("turns", 6), ("text", 6), ("pairs", 12)])
def test_an_answer_with_a_label_has_the_images_of_its_prompt(rows: str, count: int, tmp_path: Path) -> None:
    """Also where it stands in for the answer to another image, to measure how far the model is from its reference."""
    data = data_of(spec_of(tmp_path, rows, loss="kto"))
    other = present(data.mismatched)
    assert len(data) == len(other) == count and data.desirable.tolist() == [True, False] * (count // 2)
    assert (present(data.patches) == present(other.patches)).all() and present(data.patches).min() > 0
    for row in range(2):
        ids, labels = data[row].input_ids, data[row].labels
        prompt = int(np.flatnonzero(labels != -100)[0])
        assert other[row].input_ids[:prompt].tolist() == ids[:prompt].tolist()
        assert other[row].input_ids.tolist() != ids.tolist()
        ours, its = (each.images_of([row], torch.from_numpy(ids)[None])["pixel_values"] for each in (data, other))
        assert torch.equal(ours, its)


def test_earlier_answers_of_the_prompt_are_not_learned(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    path = tmp_path / "rows.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    row["prompt"] += [{"role": "assistant", "content": "A picture."}, {"role": "user", "content": "Of?"}]
    path.write_text(json.dumps(row) + "\n")
    tokenizer = load_tokenizer(spec.recipe.model)
    chosen = data_of(spec)[0]
    assert "A picture." in tokenizer.decode(chosen.input_ids)
    assert "A picture." not in tokenizer.decode(chosen.labels[chosen.labels != -100])


def test_no_split_changes_the_gradient(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, train=SGD)
    whole, together, _ = one_step(tmp_path / "whole", spec, 100)
    weights, outcome, _ = one_step(tmp_path / "one", spec, 0.5)
    assert outcome.micro_batches > together.micro_batches
    assert outcome.loss == pytest.approx(together.loss, rel=1e-6)
    assert torch.allclose(weights, whole, atol=2e-6)


def test_no_split_changes_the_divergence_or_the_gradient_of_labels(tmp_path: Path) -> None:
    """Nor does an allocation that fails while the mismatched sequences and their images are measured."""
    spec = spec_of(tmp_path, loss="kto", train={**SGD, "learning_rate": 0.3})
    whole, together, _ = three_steps(tmp_path / "whole", spec, 100)
    weights, outcomes, failures = three_steps(tmp_path / "one", spec, 0.5, faults=[30])
    assert failures and outcomes[-1].micro_batches > together[-1].micro_batches
    assert outcomes[-1].metrics["kl"] == pytest.approx(together[-1].metrics["kl"], rel=1e-4) != 0
    assert torch.allclose(weights, whole, atol=2e-6)


@pytest.mark.parametrize(("method", "loss"), [(LORA, "dpo"), (FULL, "dpo"), (LORA, "kto"), (FULL, "kto")])
def test_a_run_keeps_to_its_plan(tmp_path: Path, method: dict[str, Any], loss: str) -> None:
    """In full fine-tuning the reference is computed before the first step."""
    train_table = {"batch_size": 3, "micro_batch": 2, "max_steps": 2}
    spec = spec_of(tmp_path, method=method, loss=loss, train=train_table)
    code, events = train(new_run(tmp_path / "runs", spec))
    peak_bytes = max(step["peak_bytes"] for step in of_kind(events, "step"))
    assert code == 0 and np.isfinite([step["rewards_margin"] for step in of_kind(events, "step")]).all()
    (planned,), (finished,) = of_kind(events, "plan"), of_kind(events, "run_finished")
    assert planned["target_tokens"] < planned["length"] and planned["predicted"]["peak_bytes"] >= peak_bytes
    assert finished["measured"]["predicted"]["peak_bytes"] == pytest.approx(peak_bytes, rel=0.01)
