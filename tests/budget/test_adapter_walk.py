"""An adapted linear layer is gone through at once in a walk: that must come to what its operations come to."""

from __future__ import annotations

from typing import Any

import pytest

from engine.budget.adapter import Adapted, adapted, adapted_linear
from engine.budget.architecture import from_config
from engine.budget.ghost import Ghost, Walk
from engine.budget.growth import maxima
from engine.budget.operations import add, linear
from engine.budget.setting import setting_of
from engine.budget.walks import entry
from tests.budget.metered import QWEN2, run_spec

WIDTHS = 512, 192
METHODS: list[dict[str, Any]] = [
    {"rank": 8},
    {"rank": 8, "adapter_dtype": "bfloat16"},
    {"rank": 1000},
    {"rank": 1000, "adapter_dtype": "bfloat16"},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("metered", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("outputs", [64, 3000])
def test_at_once_and_one_after_the_other_come_to_the_same(
    method: dict[str, Any], dtype: str, offloads: bool, metered: bool, quantized: bool, outputs: int
) -> None:
    arch = from_config({**QWEN2, "hidden_size": WIDTHS[0]})
    setting = setting_of(arch, run_spec(method=method, model={"dtype": dtype})).but(quantized=quantized)
    layer, unpacked = Adapted(outputs, arch.hidden, False), outputs * arch.hidden * setting.base_bytes * quantized

    def one_after_the_other(walk: Walk, x: Ghost) -> Ghost:
        return adapted(walk, setting, layer, x, linear(walk, x, outputs, 0, False, 0, unpacked))

    def at_once(walk: Walk, x: Ghost) -> Ghost:
        return adapted_linear(walk, setting, x, layer.outputs, layer.inputs, layer.merged, unpacked)

    for gradient in (True, False):
        found = []
        for way in (one_after_the_other, at_once):
            walk = Walk(metered=metered, offloads=offloads, passes=True)
            x = entry(walk, arch, setting, gradient)
            output = add(walk, way(walk, x), way(walk, x))  # what goes in gets gradients from both
            passing, forward, held = walk.take_passing(), walk.take_peaks(), walk.live
            node, size = output.node, output.size
            assert node is not None
            del output
            walk.backward(node, walk.allocate(size))
            backward = walk.take_peaks()
            found.append((held, walk.live, *(maxima(tuple(sorted(peaks))) for peaks in (passing, forward, backward))))
            del x
        assert found[0] == found[1]
