"""A prediction does not depend on how Python holds the arguments of a call.

Traces free a tensor with the last reference to it. CPython hands arguments over to a function that it runs in the same
evaluation loop, and keeps them until the call is over as soon as a frame evaluation hook is set: that is how
torch.compile works, in engines with `train.compile` too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch._C._dynamo.eval_frame import set_eval_frame

from engine.architecture.lookup import find_architecture
from engine.budget.predict.prediction import Predictor
from engine.budget.predict.shapes import MicroBatchShape
from engine.config.schema.run import RunSpec
from tests.budget.budget_cases import FAMILIES, WAYS
from tests.budget.metered_step import GEMMA3_VL, QWEN2, QWEN2_VL, folder_of, run_spec

DORA = {"rank": 8, "dora": True}


@contextmanager
def frame_hook() -> Iterator[None]:
    """Set torch.compile's hook, without anything to compile."""
    before = set_eval_frame(False)
    try:
        yield
    finally:
        set_eval_frame(before)


def traced_anew(spec: RunSpec) -> list[int]:
    """Peak bytes with text, and with images where the model has an encoder for them."""
    arch = find_architecture(spec)
    for name, module in list(sys.modules.items()):
        if name.startswith("engine.budget."):
            for found in vars(module).values():
                if hasattr(found, "cache_clear"):
                    found.cache_clear()
    shapes = [MicroBatchShape(2, 120, patches=patches) for patches in ([0, 64] if arch.vision_encoder else [0])]
    return [Predictor(arch, spec).predict_shape(shape).peak_bytes for shape in shapes]


def assert_the_same_with_a_hook(spec: RunSpec) -> None:
    plain = traced_anew(spec)
    with frame_hook():
        assert traced_anew(spec) == plain


@pytest.mark.parametrize("way", ["lora", "lora bf16, kept", "full, attention only", "full, adafactor in bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_family(family: str, way: str, tmp_path: Path) -> None:
    tables = WAYS[way]
    model, train = {"dtype": tables.dtype, **tables.model}, {"batch_size": 4, **tables.train}
    folder = folder_of(FAMILIES[family], tmp_path)
    assert_the_same_with_a_hook(run_spec(folder, method=tables.method, model=model, train=train, data=tables.data))


@pytest.mark.parametrize(
    ("config", "method", "model"),
    [
        (QWEN2, DORA, {"quantize": "nf4"}),
        (QWEN2, {**DORA, "dropout": 0.1}, {}),
        (QWEN2_VL, {"kind": "full"}, {}),
        (GEMMA3_VL, {"kind": "full"}, {}),
    ],
    ids=["DoRA on nf4", "DoRA with dropout", "Qwen2-VL", "Gemma 3"],
)
def test_of_adapters_and_images(
    config: dict[str, Any], method: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    assert_the_same_with_a_hook(run_spec(folder_of(config, tmp_path), method=method, model=model))
