"""`model.add_tokens` beside preferences, images and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.data.batch import collate
from tests.train.preference_rows import write_pairs
from tests.train.run_helpers import make_spec, new_run, of_kind, train
from tests.train.test_image_preferences import spec_of as image_pairs
from tests.train.test_preferences import Objective, one_step

MARKS = ["<|im_start|>", "<|im_end|>"]
LORA = {"kind": "lora", "rank": 4, "objective": "dpo"}
LARGE_STEP = {"optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "batch_size": 4, "max_steps": 2}


def pairs_with_marks(folder: Path, **tables: Any) -> Any:
    """Pairs whose template has the added tokens, so that every sequence holds them."""
    path = write_pairs(folder / "pairs.jsonl", count=8)
    return make_spec(
        path,
        model={"chat_template": "chatml", "add_tokens": MARKS},
        method=LORA,
        data={"sources": [{"name": "main", "path": str(path)}], "max_length": 96},
        **{"train": LARGE_STEP, **tables},
    )


@pytest.mark.parametrize("kind", ["text", "images"])
def test_the_reference_has_the_rows_of_the_start(tmp_path: Path, kind: str) -> None:
    tables: dict[str, Any] = {"model": {"add_tokens": MARKS}, "train": LARGE_STEP}
    spec = pairs_with_marks(tmp_path) if kind == "text" else image_pairs(tmp_path, **tables)
    with Objective(spec, tmp_path / "run") as setup:
        context = setup.context
        found: list[Any] = []
        for _ in range(2):
            batch = _batch(context)
            found.append((context.loss.log_probabilities(batch), context.loss.log_probabilities(batch, adapter=False)))
            with torch.no_grad():
                for name, each in context.loaded.trainable():
                    each += 0.3 * torch.randn_like(each) if "delta" in name else 0.0
        (start, reference), (moved, reference_after) = found
        assert torch.allclose(start, reference, rtol=1e-6)
        assert torch.equal(reference, reference_after)
        assert not torch.allclose(start, moved, rtol=1e-5)  # images: only the softmax sees the rows, some 1e-4 of it


def _batch(context: Any) -> Any:
    return collate(context.data, range(4), pad_id=context.pad_id).moved(context.device.upload)


def test_pairs_with_added_tokens_learn_the_same_whatever_the_split(tmp_path: Path) -> None:
    spec = pairs_with_marks(tmp_path)
    whole, together, _ = one_step(tmp_path / "whole", spec, 100)
    weights, outcome, _ = one_step(tmp_path / "one", spec, 0.5)
    assert outcome.loss == pytest.approx(together.loss, rel=1e-6)
    assert torch.allclose(weights, whole, atol=2e-6)


def test_a_run_on_images_with_added_tokens_trains_their_rows(tmp_path: Path) -> None:
    spec = image_pairs(tmp_path, model={"add_tokens": MARKS}, train={"batch_size": 2, "max_steps": 2})
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    assert code == 0, events[-1]
    assert len(of_kind(events, "step")) == 2
