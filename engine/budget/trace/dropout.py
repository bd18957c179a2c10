"""Traces `engine.model.dropout`, whose masks are computed again in backward instead of being saved.

Try: `python -m pytest tests/budget/test_accuracy.py -k dropout`
"""

from __future__ import annotations

from engine.budget.trace.memory_trace import MemoryTrace, Storage, TracedTensor
from engine.budget.trace.polynomial import PAIR, POSITION, BytesPolynomial

MASK_BYTES = 3 * 4 + 1
"""Bytes per value of the masks: three int32 of the one being drawn, and the bool of the one before, still live."""


def dropped(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """Trace dropout of hidden states, whose masks are drawn sample by sample."""
    return _dropped(trace, x, MASK_BYTES * x.elements.per_token * POSITION)


def dropped_weights(trace: MemoryTrace, weights: TracedTensor) -> TracedTensor:
    """Trace dropout of attention weights, whose masks are drawn head by head."""
    return _dropped(trace, weights, MASK_BYTES * PAIR)


def _dropped(trace: MemoryTrace, x: TracedTensor, mixing: BytesPolynomial) -> TracedTensor:
    """The output is a copy of `x`; `mixing`: bytes that drawing masks takes, in forward and in backward."""
    size = x.size

    def backward(gradient: Storage) -> list[Storage | None]:
        result = trace.allocate(size)
        bits = trace.allocate(mixing)
        del bits
        return [result]

    output = trace.result(x.elements, x.itemsize, [x], backward)
    bits = trace.allocate(mixing)
    del bits
    return output
