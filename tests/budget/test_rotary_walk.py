"""Rotary embedding in halves is gone through at once in a walk: that must come to what its operations come to."""

from __future__ import annotations

import pytest

from engine.budget.architecture import from_config
from engine.budget.attention import rotary
from engine.budget.ghost import Ghost, Walk
from engine.budget.growth import maxima
from engine.budget.lookup import find_config
from engine.budget.operations import add, cast, concatenate, halves, multiply, subtract
from engine.budget.packed import TOKEN
from engine.budget.tape import Operation

GPT_OSS = from_config(find_config("openai/gpt-oss-20b"))
ELEMENTS = 4096 * TOKEN


def one_after_the_other(walk: Walk, x: Ghost, table: Ghost) -> Ghost:
    """`_apply_rotary_emb` of gpt-oss; its tables outlive the layer."""
    first, second = halves(walk, x)
    left = subtract(walk, multiply(walk, first, table), multiply(walk, second, table))
    right = add(walk, multiply(walk, second, table), multiply(walk, first, table))
    return concatenate(walk, [left, right])


def at_once(walk: Walk, x: Ghost, table: Ghost) -> Ghost:
    return rotary(walk, GPT_OSS, x, table.itemsize)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("metered", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_at_once_and_one_after_the_other_come_to_the_same(
    width: int, itemsize: int, offloads: bool, metered: bool, twice: bool
) -> None:
    for gradient in (True, False):
        found = []
        for turned in (one_after_the_other, at_once):
            walk = Walk(metered=metered, offloads=offloads, passes=True)
            x, table = walk.new(ELEMENTS, itemsize), walk.new(0, width)
            if gradient:
                x.node = Operation(x.size)
            output = turned(walk, x, table)
            if twice:  # what comes back is held by two
                output = add(walk, output, cast(walk, turned(walk, x, table), output.itemsize))
            passing, forward, held = walk.take_passing(), walk.take_peaks(), walk.live
            node, size = output.node, output.size
            assert (node is not None) == gradient
            del output
            if node is not None:
                walk.backward(node, walk.allocate(size))
            found.append((held, walk.live, *(maxima(peaks) for peaks in (passing, forward, walk.take_peaks()))))
            del x, table
        assert found[0] == found[1]
