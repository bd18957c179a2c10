"""Buffers of sequence parallelism around attention: all-to-alls from all heads at some positions to some heads at all
positions, and back.

Written like `engine.distributed.sequence_parallel`, tensor by tensor. Both layouts have the same size, except for keys
and values that are sent to several ranks.

Try: `pytest tests/distributed/test_sequence.py`
"""

from __future__ import annotations

from engine.budget.architecture.facts import Architecture
from engine.budget.trace.memory_trace import MemoryTrace, Storage, TracedTensor
from engine.budget.trace.operations import pieces
from engine.budget.trace.polynomial import NO_BYTES, BytesPolynomial


def to_heads(
    trace: MemoryTrace, arch: Architecture, sequence: int, query: TracedTensor, key: TracedTensor, value: TracedTensor
) -> tuple[TracedTensor, TracedTensor, TracedTensor]:
    """Query, key and value are sent in one buffer and received in another, of which they are views; each has a
    gradient."""
    times = max(1, sequence // arch.kv_heads)
    parents, elements = [query, key, value], [query.elements, key.elements * times, value.elements * times]
    total = sum(elements, NO_BYTES) * query.itemsize
    sizes = [tensor.size for tensor in parents]

    def back(gradient: Storage) -> list[Storage | None]:
        received = _received(trace, total)
        del gradient
        summed = [trace.allocate(size) for size in sizes[1:] if times > 1]
        made: list[Storage | None] = [trace.allocate(size) for size in sizes]
        del received, summed
        return made

    arrived = TracedTensor(_received(trace, total), sum(elements, NO_BYTES), query.itemsize, total)
    query, key, value = pieces(trace, trace.on_tape(arrived, parents, back), elements)
    return query, key, value


def to_positions(trace: MemoryTrace, output: TracedTensor) -> TracedTensor:
    """The output is sent back, and laid out with the heads of a position side by side."""
    size = output.size

    def back(gradient: Storage) -> list[Storage | None]:
        return [_received(trace, size)]

    received = _received(trace, size)
    joined = trace.result(output.elements, output.itemsize, [output], back)
    del received
    return joined


def _received(trace: MemoryTrace, size: BytesPolynomial) -> Storage:
    """The receive buffer of an all-to-all, after the send buffer beside it is freed."""
    sent = trace.allocate(size)
    received = trace.allocate(size)
    del sent
    return received
