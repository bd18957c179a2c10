"""LoRA beside a linear layer as peft 0.19 computes it: plain, with keyed dropout, on a 4-bit base, and DoRA.

The local variables are those of `peft/tuners/lora/layer.py`, `bnb.py` and `dora.py`.

Try: `python -m pytest tests/budget/test_accuracy.py`
"""

from __future__ import annotations

from typing import NamedTuple

from engine.budget.blocks import round_to_blocks
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, Storage, TracedTensor
from engine.budget.trace.operations import add, cast, copy, linear, scale, scale_by_weight
from engine.budget.trace.polynomial import BYTE, POSITION

INTEGER = 4
"""Bytes of an int32."""


class AdaptedLayer(NamedTuple):
    """Sizes of a linear layer that has an adapter."""

    outputs: int
    inputs: int
    biased: bool
    merged: int = 1
    """Tokens that are joined into one input of the layer."""


def adapted(
    trace: MemoryTrace, config: MemoryConfig, layer: AdaptedLayer, x: TracedTensor, result: TracedTensor
) -> TracedTensor:
    """Trace base(x) + B(A(dropout(x))) * scaling, where `result` is base(x): computed in the wider dtype of base and
    adapter, then cast to the base's."""
    itemsize = result.itemsize
    if config.quantized:
        result = copy(trace, result)
    x = cast(trace, x, config.adapter_bytes)
    if config.dora:
        result = _dora(trace, config, layer, x, result)
    elif config.quantized:
        update = cast(trace, _update(trace, config, layer, x), itemsize)
        result = add(trace, result, update)
    else:
        result = add(trace, result, _update(trace, config, layer, x))
    return cast(trace, result, itemsize)


def _update(trace: MemoryTrace, config: MemoryConfig, layer: AdaptedLayer, x: TracedTensor) -> TracedTensor:
    """Trace B(A(dropout(x))) * scaling."""
    return scale(trace, _low_rank(trace, config, layer, dropped(trace, x) if config.dropout else x))


def _low_rank(trace: MemoryTrace, config: MemoryConfig, layer: AdaptedLayer, x: TracedTensor) -> TracedTensor:
    """Trace B(A(x))."""
    rank, itemsize = config.rank, config.adapter_bytes
    first = linear(trace, x, -(-rank // layer.merged), round_to_blocks(rank * layer.inputs * itemsize), True)
    del x
    outputs = -(-layer.outputs // layer.merged)
    return linear(trace, first, outputs, round_to_blocks(rank * layer.outputs * itemsize), True)


def dropped(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """Trace `engine.model.dropout`: the output is a copy of `x`; backward draws the mask again, so nothing is saved.

    The mask is drawn row by row; a row needs three int32 per value, while the previous row's bool mask is still live.
    """
    size, mixing = x.size, (3 * INTEGER + 1) * x.elements.per_token * POSITION

    def backward(gradient: Storage) -> list[Storage | None]:
        result = trace.allocate(size)
        bits = trace.allocate(mixing)
        del bits
        return [result]

    output = trace.result(x.elements, x.itemsize, [x], backward)
    bits = trace.allocate(mixing)
    del bits
    return output


def _dora(
    trace: MemoryTrace, config: MemoryConfig, layer: AdaptedLayer, x: TracedTensor, result: TracedTensor
) -> TracedTensor:
    """Trace `DoraLinearLayer.forward`: result + (m - 1) · result + m · B(A(x)) · scaling, where m is the magnitude
    divided by the norm of W + B·A.

    The norm has no gradient. B·A, the identity matrix it is computed from, and a copy of W in the adapter's dtype stay
    allocated until the function returns.
    """
    itemsize, base_result = config.adapter_bytes, result
    whole = layer.outputs * layer.inputs * itemsize * BYTE
    held = [trace.allocate(inputs * layer.inputs * itemsize * BYTE) for inputs in (layer.inputs, config.rank)]
    held.append(trace.allocate(whole))
    if config.base_bytes != itemsize or config.quantized:
        held.append(trace.allocate(whole))
    summed = [trace.allocate(whole), trace.allocate(whole)]
    del summed
    vector = round_to_blocks(layer.outputs * itemsize)
    low_rank = _low_rank(trace, config, layer, dropped(trace, x) if config.dropout else x)
    if layer.biased:
        base_result = copy(trace, base_result)
    left = scale_by_weight(trace, base_result, vector, True, itemsize)
    right = scale(trace, scale_by_weight(trace, low_rank, vector, True, itemsize))
    update = add(trace, left, right)
    del left, right, low_rank, base_result, held
    return add(trace, result, update)
