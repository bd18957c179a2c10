"""Packed rows are planned with the kernel that will run: torch's varlen kernel where the card has it, else a mask."""

from __future__ import annotations

from typing import Any

import pytest

from engine.architecture.lookup import find_architecture
from engine.budget.predict.prediction import predict
from engine.budget.trace.memory_config import resolved_attention
from engine.config.schema.run import RunSpec

CARD = {"kind": "cuda", "memory_gib": 80.0, "compute_capability": 8.0}


def spec_of(device: dict[str, Any], **model: str) -> RunSpec:
    recipe = {
        "name": "any",
        "model": {"id": "builtin:tiny", "tokenizer": "builtin:bytes", "init": "random", **model},
        "data": {"sources": [{"name": "dates", "path": "builtin:dates"}], "packing": True, "max_length": 2048},
        "train": {"batch_size": 8},
    }
    return RunSpec.model_validate({"name": "any", "profile": {"name": "here", "device": device}, "recipe": recipe})


@pytest.mark.parametrize(
    ("device", "model", "kernel"),
    [
        (CARD, {}, "flash"),
        (CARD, {"dtype": "float32"}, "sdpa"),
        (CARD, {"attention": "sdpa"}, "sdpa"),
        (CARD | {"compute_capability": 7.5}, {}, "sdpa"),
        ({"kind": "cuda", "memory_gib": 80.0}, {}, "sdpa"),
        ({"kind": "metered", "memory_gib": 1.0}, {}, "sdpa"),
    ],
)
def test_the_kernel_follows_the_card(device: dict[str, Any], model: dict[str, str], kernel: str) -> None:
    spec = spec_of(device, **model)
    assert resolved_attention(find_architecture(spec), spec) == kernel


def test_a_plan_without_the_mask_is_that_of_varlen_by_name() -> None:
    found, named, masked = (spec_of(CARD, attention=kernel) for kernel in ("auto", "varlen", "sdpa"))
    arch = find_architecture(found)
    peaks = [predict(arch, spec, rows=4, length=2048).peak_bytes for spec in (found, named, masked)]
    assert peaks[0] == peaks[1] < peaks[2]
