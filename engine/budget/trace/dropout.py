"""Traces `engine.model.dropout`, whose masks are computed again in backward instead of being saved.

On CUDA a kernel draws them in registers (`engine.model.dropout_kernel`); elsewhere drawing takes memory.

Try: `python -m pytest tests/budget/test_accuracy.py -k dropout`
"""

from __future__ import annotations

from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, Storage, TracedTensor
from engine.budget.trace.polynomial import PAIR, POSITION, BytesPolynomial

MASK_BYTES = 3 * 4 + 1
"""Bytes per value of the masks: three int32 of the one being drawn, and the bool of the one before, still live."""


def mask_bytes(config: MemoryConfig) -> int:
    """Bytes that are allocated temporarily while a mask is drawn, per value of the mask; 0 if a kernel draws it in
    registers."""
    return 0 if config.fused_dropout else MASK_BYTES


def dropped(trace: MemoryTrace, config: MemoryConfig, x: TracedTensor) -> TracedTensor:
    """Trace dropout of hidden states, whose masks are drawn sample by sample."""
    return _dropped(trace, x, mask_bytes(config) * x.elements.per_token * POSITION)


def dropped_weights(trace: MemoryTrace, config: MemoryConfig, weights: TracedTensor) -> TracedTensor:
    """Trace dropout of attention weights, whose masks are drawn head by head."""
    return _dropped(trace, weights, mask_bytes(config) * PAIR)


def _dropped(trace: MemoryTrace, x: TracedTensor, mixing: BytesPolynomial) -> TracedTensor:
    """Trace a dropout of `x`: the output is a new tensor; in forward and in backward, `mixing` bytes are allocated
    temporarily while the masks are drawn."""
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
