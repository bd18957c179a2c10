"""Small runs on images, for tests and the torture. Not a test module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.config.schema.run import RunSpec
from tests.train.fault_rig import Case
from tests.train.run_helpers import make_spec
from tests.vision_models import detection_source, write_boxes, write_gemma3, write_qwen2_vl

SIZES = ((112, 84), (56, 112), (200, 90), (60, 60))
TOWER = ["model.visual.blocks.*.attn.*", "model.visual.blocks.*.mlp.fc?"]
LANGUAGE = "model.language_model.**.*_proj"
WRITERS: dict[str, Callable[..., Any]] = {
    "qwen2_vl": write_qwen2_vl,
    "qwen2_5_vl": partial(write_qwen2_vl, family="qwen2_5_vl"),
    "gemma3": write_gemma3,
}


def image_spec(folder: Path, family: str = "qwen2_vl", **tables: Any) -> RunSpec:
    """A run of a tiny model of `family` on twelve drawn images of different sizes."""
    model = folder / family
    if not model.exists():
        WRITERS[family](model)
    data = write_boxes(folder / "data", count=12, sizes=SIZES)
    named = {"id": str(model), "tokenizer": str(model), "init": "pretrained", **tables.pop("model", {})}
    read = {"sources": [detection_source(data)], "max_length": 256, **tables.pop("data", {})}
    return make_spec(data, model=named, data=read, **tables)


@dataclass(frozen=True)
class ImageCase(Case):
    """A small vision-language model whose encoder learns as well."""

    def spec(self, folder: Path) -> RunSpec:
        """A run of this case with its files in `folder`."""
        return image_spec(
            folder, method={"kind": self.method}, data={"valid_fraction": 0.25},
            train={"batch_size": 4, "micro_batch": 2, "max_steps": 2, "warmup_steps": 0,
                   "gradient_checkpointing": self.checkpointing},
            eval={"metrics": ["loss", "exact_match"], "samples": 2}, generate={"max_new_tokens": 3},
            backoff={"ladder": list(self.ladder)},
        )  # fmt: skip


IMAGE_CASES = (
    ImageCase("images, full", "full"),
    ImageCase("images, full, recomputed activations", "full", checkpointing=True),
    ImageCase("images, lora", "lora"),
)
