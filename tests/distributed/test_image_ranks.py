"""Steps on two ranks equal steps on one where some samples have images, and a rank may have none in a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from tests.distributed.faults import differences
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import FULL, LADDER, RankWorkbench
from tests.vision_models import write_boxes, write_qwen2_vl


def steps_on_images(ranks: Ranks, folder: Path) -> Any:
    source = {"name": "mixed", "path": str(folder / "mixed.jsonl"), "format": "image-chat"}
    model = str(folder / "model")
    work = RankWorkbench(folder, ranks, {
        **FULL, "model": {"id": model, "tokenizer": model, "init": "pretrained"}, "backoff": LADDER,
        "data": {"sources": [source], "max_length": 128}, "train": {"batch_size": 4, "micro_batch": 1},
    })  # fmt: skip
    found = work.steps()
    work.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight samples, of which three have an image."""
    folder = tmp_path_factory.mktemp("images")
    write_qwen2_vl(folder / "model")
    write_boxes(folder, count=3, sizes=((56, 112), (112, 84)))
    rows = [{"prompt": "What?", "completion": f"x{number}", "image": f"images/{number}.png" if number < 3 else None}
            for number in range(8)]  # fmt: skip
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_two_ranks_learn_from_images_what_one_process_learns(folder: Path) -> None:
    first, second = run_ranks([steps_on_images], folder)["steps_on_images"]
    assert torch.equal(first["weights"], second["weights"])
    assert differences(first, steps_on_images(SINGLE_PROCESS, folder)) == []
