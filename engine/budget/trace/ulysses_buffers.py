"""Traces the all-to-alls of sequence parallelism: before attention a rank exchanges all heads at some positions for
some heads at all positions, and after attention back.

The tensors are those of `engine.distributed.sequence_parallel`. Both layouts have the same size, except that keys and
values may be sent to several ranks.

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
    """Trace the all-to-all before attention, among `sequence` ranks: query, key and value are sent in one buffer and
    received in another.

    Returns views of the receive buffer. If there are fewer key heads than ranks, keys and values are sent several
    times.
    """
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
    """Trace the all-to-all after attention: the output is sent back, then copied so that heads are adjacent."""
    size = output.size

    def back(gradient: Storage) -> list[Storage | None]:
        return [_received(trace, size)]

    received = _received(trace, size)
    joined = trace.result(output.elements, output.itemsize, [output], back)
    del received
    return joined


def _received(trace: MemoryTrace, size: BytesPolynomial) -> Storage:
    """Trace an all-to-all: a send and a receive buffer are live at once; the receive buffer is returned."""
    sent = trace.allocate(size)
    received = trace.allocate(size)
    del sent
    return received
