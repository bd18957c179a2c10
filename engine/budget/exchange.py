"""What ranks that share sequences hold around attention: buffers that heads and positions are traded through.

Written like `engine.distributed.sequence_parallel`, tensor by tensor. A rank has as many values of all its positions'
heads as of its own heads at all positions, so sizes stay what they are, but for keys and values that go to several
ranks.

Try: `pytest tests/distributed/test_sequence.py`
"""

from __future__ import annotations

from engine.budget.architecture import Architecture
from engine.budget.ghost import Ghost, Walk
from engine.budget.operations import pieces
from engine.budget.tape import Storage


def to_heads(
    walk: Walk, arch: Architecture, sequence: int, query: Ghost, key: Ghost, value: Ghost
) -> tuple[Ghost, Ghost, Ghost]:
    """The three travel in one buffer and arrive in another, of which they are views; gradients come back apart."""
    times = max(1, sequence // arch.kv_heads)
    parents, elements = [query, key, value], [query.elements, key.elements * times, value.elements * times]
    total = sum(elements) * query.itemsize
    sizes = [ghost.size for ghost in parents]

    def back(gradient: Storage) -> list[Storage | None]:
        received = _received(walk, total)
        del gradient
        summed = [walk.allocate(size) for size in sizes[1:] if times > 1]
        made: list[Storage | None] = [walk.allocate(size) for size in sizes]
        del received, summed
        return made

    arrived = walk.tensor(_received(walk, total), sum(elements), query.itemsize, total)
    query, key, value = pieces(walk, walk.made_of(parents, arrived, back), elements)
    return query, key, value


def to_positions(walk: Walk, output: Ghost) -> Ghost:
    """Outputs go back, and are laid out with the heads of a position side by side."""
    size = output.size

    def back(gradient: Storage) -> list[Storage | None]:
        return [_received(walk, size)]

    received = _received(walk, size)
    joined = walk.result(output.elements, output.itemsize, [output], back)
    del received
    return joined


def _received(walk: Walk, size: int) -> Storage:
    """What arrives, while what is sent was there beside it."""
    sent = walk.allocate(size)
    received = walk.allocate(size)
    del sent
    return received
